"""Training: what it learns and reports, and that an interrupted run continues as if it had not been."""

import gc
import math
import weakref
from functools import partial

import numpy as np
import pytest
import torch

from comparisons import same_bits
from ostinato.models import CELLS, LanguageModel
from ostinato.training import Trainer, TrainingSettings, held_out
from ostinato.training.trainer import _loss

SMALL = {"batch_size": 4, "chunk_length": 16, "warmup_steps": 3, "learning_rate": 1e-2, "held_out": 0.2}


def make(tokens, vocab_size, cell="mingru", dropout=0.0, machine=None, **settings):
    torch.manual_seed(0)
    model = LanguageModel(vocab_size, width=16, num_layers=1, cell=cell, dropout=dropout)
    return Trainer(model, tokens, TrainingSettings(**{**SMALL, **settings}), **(machine or {}))


def entropy(p):
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
def test_learns_a_period_that_needs_memory(cell):
    # Runs of 8 equal tokens.  Who sees the last 4 alone, as the convolution does, knows that a run that began
    # among them goes on, and is left with a chance of 1 in 5 at the other 5 places in 8.
    tokens = (torch.arange(2000) // 8) % 2
    trainer = make(tokens, 2, cell, steps=150, batch_size=8, chunk_length=64)
    trainer.advance(150)
    assert trainer.evaluate().held_out_loss < 5 / 8 * entropy(1 / 5) / 2


def test_held_out_loss_is_the_mean_over_the_streams():
    torch.manual_seed(0)
    model = LanguageModel(5, width=8, num_layers=1, dropout=0.5).double()
    tokens = torch.randint(5, (1 + 3 * 300,))
    logits, _ = model.eval()(tokens[:-1].view(3, 300))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
    model.train()
    assert held_out(model, tokens, tokens_at_once=3 * 70) == pytest.approx(expected.item(), rel=1e-6)
    assert model.training


def test_the_held_out_part_is_not_trained_on():
    tokens = torch.cat([torch.zeros(800), torch.ones(200)]).long()
    trainer = make(tokens, 2, steps=40)
    trainer.advance(40)
    point = trainer.evaluate()
    assert trainer.train_tokens.sum() == 0
    assert point.held_out_loss > 1 > point.train_loss


def test_train_loss_is_the_mean_since_the_point_before():
    tokens = torch.randint(5, (500,), generator=torch.Generator().manual_seed(1))
    single, double = make(tokens, 5), make(tokens, 5)
    losses = []
    for _ in range(4):
        single.advance(1)
        losses.append(single.evaluate().train_loss)
    assert len(set(losses)) == 4
    for first in (0, 2):
        mean = double.advance(2)
        point = double.evaluate()
        assert point.train_loss == mean == pytest.approx(sum(losses[first : first + 2]) / 2, rel=1e-6)
    assert [point.step for point in double.curve] == [2, 4]
    assert [point.tokens for point in double.curve] == [2 * 4 * 16, 4 * 4 * 16]


def test_matrices_decay_and_nothing_else_does():
    trainer = make(torch.zeros(500).long(), 1, learning_rate=1e-3, weight_decay=0.5)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.optimizer.step()
    for name, parameter in trainer.model.named_parameters():
        factor = 1 - 1e-3 * 0.5 if parameter.ndim >= 2 else 1
        torch.testing.assert_close(parameter.detach(), before[name].detach() * factor)


def test_divergence_is_an_error():
    trainer = make(torch.zeros(500).long(), 1)
    torch.nn.init.constant_(trainer.model.head.weight, math.nan)
    with pytest.raises(
        FloatingPointError, match=r"the training loss is nan at step 2; a lower learning rate than 0\.01"
    ):
        trainer.advance(2)


def test_learning_rate_warms_up_and_falls():
    trainer = make(torch.zeros(500).long(), 1, steps=20, warmup_steps=4, final_rate=0.1)
    rates = []
    for step in range(21):
        trainer.step = step
        rates.append(trainer.learning_rate)
    assert rates[0] == pytest.approx(1e-2 / 4)
    assert max(rates) == rates[3] <= 1e-2
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(1e-3)


IN_A_GRAPH = {"device": "cuda", "graph": True}
MACHINES = [{}, pytest.param(IN_A_GRAPH, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("machine", MACHINES, ids=["eager", "graph"])
@pytest.mark.parametrize("cell", ["mingru", "gru"])
@pytest.mark.parametrize("evaluated", [True, False])
def test_resumed_equals_uninterrupted(cell, evaluated, machine):
    tokens = torch.randint(7, (900,), generator=torch.Generator().manual_seed(0))
    settings = {"cell": cell, "dropout": 0.3, "steps": 12, "machine": machine}
    whole = make(tokens, 7, **settings)
    whole.advance(5)
    if evaluated:
        whole.evaluate()
    state, tensors = whole.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    weights = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    whole.advance(7)

    torch.manual_seed(99)
    resumed = make(tokens, 7, **settings)
    resumed.model.load_state_dict(weights)
    resumed.restore(state, tensors)
    resumed.advance(7)
    assert same_bits(whole.model.parameters(), resumed.model.parameters())
    a, b = whole.evaluate(), resumed.evaluate()
    assert (a.step, a.train_loss, a.held_out_loss) == (b.step, b.train_loss, b.held_out_loss)
    assert len(whole.curve) == len(resumed.curve)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"batch_size": -2}, "batch_size must be at least 1; got -2"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0 and finite; got 0.0"),
        ({"weight_decay": math.inf}, "weight_decay must be at least 0 and finite; got inf"),
        ({"held_out": 1.0}, "held_out must be between 0 and 1; got 1.0"),
        ({"held_out_limit": 1}, "held_out_limit must be at least 2; got 1"),
        ({"seed": 1 << 63}, r"seed must be below 2\*\*63; got 9223372036854775808"),
        ({"seconds": 0.0}, "seconds must be above 0 and finite; got 0.0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainingSettings(**settings)


@pytest.mark.parametrize("settings", [{"steps": 1.5}, {"steps": math.nan}, {"seed": "1"}, {"batch_size": True}])
def test_settings_that_are_no_integers(settings):
    with pytest.raises(TypeError, match=f"{next(iter(settings))} must be an int; got"):
        TrainingSettings(**settings)


@pytest.mark.parametrize("settings", [{"learning_rate": "1e-3"}, {"held_out": True}, {"seconds": "1"}])
def test_settings_that_are_no_numbers(settings):
    with pytest.raises(TypeError, match=f"{next(iter(settings))} must be a number; got"):
        TrainingSettings(**settings)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="tokens must be a tensor; got list"):
        make([0, 1], 2)
    with pytest.raises(TypeError, match="accumulate must be an int; got float"):
        Trainer(LanguageModel(2, width=8), torch.zeros(500).long(), TrainingSettings(**SMALL), accumulate=2.0)
    with pytest.raises(TypeError, match="model must be a LanguageModel; got Linear"):
        Trainer(torch.nn.Linear(2, 2), torch.zeros(500).long(), TrainingSettings(**SMALL))
    with pytest.raises(TypeError, match="settings must be a TrainingSettings; got dict"):
        Trainer(LanguageModel(2, width=8), torch.zeros(500).long(), SMALL)
    with pytest.raises(ValueError, match=r"precision must be one of .*; got array"):
        Trainer(LanguageModel(2, width=8), torch.zeros(500).long(), TrainingSettings(**SMALL), precision=np.ones(2))
    for flag in ("compile", "shard", "graph"):
        with pytest.raises(TypeError, match=f"{flag} must be a bool; got int"):
            Trainer(LanguageModel(2, width=8), torch.zeros(500).long(), TrainingSettings(**SMALL), **{flag: 1})
    with pytest.raises(ValueError, match="accumulate must be at least 1; got 0"):
        Trainer(LanguageModel(2, width=8), torch.zeros(500).long(), TrainingSettings(**SMALL), accumulate=0)


def test_one_token_has_no_loss():
    with pytest.raises(ValueError, match="tokens must be at least two; got 1"):
        held_out(LanguageModel(5, width=8, num_layers=1), torch.tensor([1]))


def test_tokens_that_are_none():
    for dtype in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=rf"tokens must be integers; got a tensor of {dtype}"):
            make(torch.zeros(500, dtype=dtype), 2)
    with pytest.raises(ValueError, match=r"tokens must have shape \(N,\); got \(2, 500\)"):
        make(torch.zeros(2, 500).long(), 2)


def test_text_too_short():
    with pytest.raises(
        ValueError, match=r"chunk of 16 tokens, and a share of 0\.2 held out, need about 85 tokens; got 84"
    ):
        make(torch.zeros(84).long(), 1)
    make(torch.zeros(85).long(), 1)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiles_as_one_graph(precision):
    torch.manual_seed(0)
    model = LanguageModel(5, width=8, num_layers=1)
    trainer = Trainer(model, torch.zeros(500).long(), TrainingSettings(**SMALL), precision=precision)
    inputs, targets = torch.randint(5, (2, 4, 16))
    model.eval()
    compiled = torch.compile(_loss, backend="aot_eager", fullgraph=True)
    with trainer._autocast():
        torch.testing.assert_close(compiled(model, inputs, targets), _loss(model, inputs, targets))


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
def test_trains_the_same_in_a_cuda_graph(cell):
    """Dropout included."""
    tokens = torch.randint(7, (900,), generator=torch.Generator().manual_seed(0))
    points = []
    for machine in (IN_A_GRAPH, IN_A_GRAPH | {"graph": False}):
        trainer = make(tokens, 7, cell, dropout=0.3, machine=machine | {"precision": "float32"}, steps=10)
        trainer.advance(6)
        trainer.evaluate()
        trainer.advance(4)
        points.append((trainer.curve[0].train_loss, trainer.evaluate().train_loss, trainer.curve[1].held_out_loss))
    assert points[0] == pytest.approx(points[1], rel=1e-4)


@pytest.mark.gpu
def test_capture_warns_of_nothing_and_frees_its_memory(recwarn):
    tokens = torch.randint(7, (900,), generator=torch.Generator().manual_seed(0))
    make(tokens, 7, machine=IN_A_GRAPH).advance(3)  # what libraries keep
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    make(tokens, 7, machine=IN_A_GRAPH).advance(3)
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert not recwarn.list


@pytest.mark.parametrize("graph", [False, True])
def test_a_trainer_goes_with_its_last_reference(graph, monkeypatch):
    monkeypatch.setattr(Trainer, "can_capture", lambda *_: True)
    monkeypatch.setattr("ostinato.training.trainer.captured", lambda differentiate, *_: partial(differentiate))
    trainer = make(torch.zeros(900).long(), 1, machine={"graph": graph})
    trainer.advance(2)
    gone = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert gone() is None
    finally:
        gc.enable()


def test_the_loss_is_captured_once_at_the_first_step(monkeypatch):
    calls = []

    def captured(differentiate, parameters, inputs, targets):
        assert {*map(id, parameters)} == {*map(id, trainer.model.parameters())}
        calls.append("captured")

        def replayed(*batch):
            calls.append("replayed")
            assert [x.shape for x in batch] == [inputs.shape, targets.shape]
            return differentiate(*batch)

        return replayed

    monkeypatch.setattr("ostinato.training.trainer.captured", captured)
    monkeypatch.setattr(Trainer, "can_capture", lambda *_: True)
    tokens = torch.randint(7, (900,), generator=torch.Generator().manual_seed(0))
    trainer, eager = (make(tokens, 7, machine={"graph": graph}) for graph in (True, False))
    assert [trainer.advance(2), trainer.advance(1)] == [eager.advance(2), eager.advance(1)]
    assert calls == ["captured", *["replayed"] * 3]


@pytest.mark.parametrize("machine", [{"device": "cpu"}, {"device": "cuda", "compile": True}, {"accumulate": 2}])
def test_graphs_that_cannot_be_captured_are_refused(machine):
    with pytest.raises(ValueError, match="graph must be False except on a CUDA device, in one process"):
        make(torch.zeros(900).long(), 1, machine=machine | {"graph": True})
