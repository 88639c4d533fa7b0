"""The language model: carried states, steps and generation against the whole sequence at once."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from ostinato.models import CELLS, CausalConv, LanguageModel, draw

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def make(cell="mingru", dtype=torch.float64, **settings):
    torch.manual_seed(0)
    model = LanguageModel(11, **{"width": 12, "num_layers": 2, "cell": cell, **settings}).to(dtype).eval()
    return model, torch.randint(11, (3, 23))


@pytest.mark.parametrize(
    ("cell", "conv_kernel", "dtype"),
    [
        *itertools.product(["mingru", "minlstm", "gru", "lstm"], [0, 1, 4], [torch.float32, torch.float64]),
        *((cell, 4, torch.float64) for cell in list(CELLS)[4:]),
    ],
)
@torch.no_grad()
def test_halves_and_steps_equal_the_whole(cell, conv_kernel, dtype):
    model, tokens = make(cell, dtype, conv_kernel=conv_kernel)
    whole, last = model(tokens)
    for middle in (1, 2, 10):
        first, state = model(tokens[:, :middle])
        second, state = model(tokens[:, middle:], state)
        torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(state, last, rtol=0, atol=TOLERANCE[dtype])
    state = model.initial_state(3)
    for t in range(tokens.size(1)):
        logits, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(state, last, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("cell", CELLS)
@torch.no_grad()
def test_sees_all_of_the_past_and_none_of_the_future(cell):
    model, tokens = make(cell)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 11
    difference = (model(tokens)[0] - model(changed)[0]).abs().amax(dim=(0, 2))
    assert (difference[:10] == 0).all()
    assert (difference[10:] > 0).all()


@torch.no_grad()
def test_conv_is_pytorchs():
    conv, x = CausalConv(5, 4).double(), torch.randn(2, 9, 5, dtype=torch.float64)
    last = torch.randn(2, 3, 5, dtype=torch.float64)
    y, passed_on = conv(x, last)
    padded = torch.cat([last, x], 1)
    expected = torch.nn.functional.conv1d(padded.mT, conv.weight.T[:, None], conv.bias, groups=5).mT
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    assert torch.equal(passed_on, x[:, -3:])


def test_state_keeps_its_size():
    model, tokens = make()
    _, state = model(tokens)
    sizes = [[part.shape for part in block] for block in model.initial_state(3)]
    assert [[part.shape for part in block] for block in state] == sizes


def test_gradients_reach_every_parameter():
    model, tokens = make()
    model(tokens)[0].logsumexp(-1).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_generate_continues_as_forward_says():
    model, tokens = make()
    written = torch.stack(list(model.generate(tokens, 20, temperature=0)), 1)
    assert written.shape == (3, 20)
    logits, _ = model(torch.cat([tokens, written], 1))
    assert torch.equal(written, logits[:, tokens.size(1) - 1 : -1].argmax(-1))


def test_generate_leaves_each_part_in_its_own_mode():
    model, tokens = make(dropout=0.5)
    model.train()
    frozen = next(part for part in model.modules() if isinstance(part, torch.nn.Dropout)).eval()
    writing = model.generate(tokens, 20, temperature=0)
    first = next(writing)
    assert not any(part.training for part in model.modules())
    writing.close()
    assert [part for part in model.modules() if not part.training] == [frozen]
    assert torch.equal(first, model.eval()(tokens)[0][:, -1].argmax(-1))


def test_generate_is_deterministic_by_seed_and_streams():
    model, tokens = make()

    def generate(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return torch.stack(list(model.generate(tokens[:1], 60, generator=generator, **options)), 1)

    assert torch.equal(generate(1), generate(1))
    assert not torch.equal(generate(1), generate(2))
    assert torch.equal(generate(1, top_k=1), generate(2, temperature=0))
    for temperature in (1e-30, 5e-324):
        assert torch.equal(generate(1, temperature=temperature), generate(2, temperature=0))
    for temperature in (1e300, 10**30):
        assert torch.equal(generate(1, temperature=temperature, top_k=2), generate(1, temperature=1e30, top_k=2))
    assert torch.equal(generate(1, temperature=Fraction(1, 2)), generate(1, temperature=0.5))
    stream = model.generate(tokens, 10**9)
    assert next(stream).shape == (3,)


def test_generate_turns_dropout_off_and_on_again():
    model, tokens = make(dropout=0.5)
    model.train()
    a, b = ([token.tolist() for token in model.generate(tokens, 20, temperature=0)] for _ in range(2))
    assert a == b
    assert model.training


def test_draw_follows_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(200_000, 4)
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 3)):
        expected = (logits[0, : top_k or 4] / temperature).softmax(-1)
        counts = draw(logits, temperature, top_k, generator).bincount(minlength=4) / len(logits)
        # Five standard deviations of a binomial's share are at most 5 * sqrt(0.25 / n).
        assert (counts[: len(expected)] - expected).abs().max() < 5 * math.sqrt(0.25 / len(logits))
        assert counts[len(expected) :].sum() == 0


def test_settings_build_the_same_model():
    model, tokens = make("minlstm", conv_kernel=2, expansion=1.25)
    twin = LanguageModel(**model.settings).double().eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(tokens)[0], model(tokens)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "width must be at least 1; got 0"),
        ({"num_layers": -1}, "num_layers must be at least 1; got -1"),
        ({"vocab_size": 0}, "vocab_size must be at least 1; got 0"),
        ({"expansion": 0}, "expansion must be above 0 and finite; got 0"),
        ({"expansion": 0.001}, "hidden_size, expansion \\* width, must be at least 1; got 0"),
        ({"width": 1 << 63}, "width must be below 2\\*\\*63; got 9223372036854775808"),
        ({"mlp_ratio": 1e30}, "mlp_ratio \\* width must be below 2\\*\\*63; got \\d+"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio must be above 0 and finite; got nan"),
        ({"cell": "rnn"}, "cell must be one of mingru, .*, slstm; got 'rnn'"),
        ({"conv_kernel": -1}, "conv_kernel must be at least 0; got -1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1; got 1.0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        LanguageModel(**{"vocab_size": 5, "width": 8, **settings})


@pytest.mark.parametrize("name", ["expansion", "mlp_ratio", "dropout"])
def test_ratios_that_are_no_numbers(name):
    with pytest.raises(TypeError, match=f"{name} must be a number; got str"):
        LanguageModel(**{"vocab_size": 5, name: "0.5"})


@pytest.mark.parametrize("name", ["vocab_size", "width", "num_layers", "conv_kernel"])
def test_sizes_are_integers(name):
    with pytest.raises(TypeError, match=f"{name} must be an int; got float"):
        LanguageModel(**{"vocab_size": 5, "width": 8, name: 2.0})


def test_bad_tokens():
    model, tokens = make()
    with pytest.raises(TypeError, match=r"tokens must be a tensor of torch\.int64 or torch\.int32; got str"):
        model("text")
    with pytest.raises(TypeError, match=r"got a tensor of torch\.float32"):
        model(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"tokens must have shape \(B, T\); got \(3,\)"):
        model(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="state must have a part for each of 2 blocks; got 1"):
        model(tokens, model.initial_state(3)[:1])
    with pytest.raises(TypeError, match=r"prompt must be a tensor of torch\.int64 or torch\.int32; got list"):
        model.generate([[1]], 1)
    with pytest.raises(TypeError, match="top_k must be an int; got float"):
        model.generate(tokens, 1, top_k=2.0)
    with pytest.raises(TypeError, match="temperature must be a number; got str"):
        model.generate(tokens, 1, temperature="hot")
    with pytest.raises(TypeError, match="length must be an int; got str"):
        model.generate(torch.zeros(1, 1, dtype=torch.long), "5")
    with pytest.raises(TypeError, match=r"prompt must be a tensor of torch\.int64 or torch\.int32; got a tensor of"):
        model.generate(tokens.float(), 1)
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator; got int"):
        model.generate(tokens, 1, generator=0)
    with pytest.raises(TypeError, match=r"token must be a tensor of torch\.int64 or torch\.int32; got int"):
        model.step(3, model.initial_state(1))
    with pytest.raises(ValueError, match=r"token must have shape \(B,\); got \(\)"):
        model.step(tokens[0, 0], model.initial_state(1))
    with pytest.raises(ValueError, match=r"cell must be one of .*; got \['gru'\]"):
        LanguageModel(5, cell=["gru"])


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (lambda last, hidden: None, TypeError, r"state\[1\] must be a pair, .*; got NoneType"),
        (lambda last, hidden: (last,), TypeError, r"state\[1\] must be a pair, .*; got tuple"),
        (lambda last, hidden: (None, hidden), TypeError, r"state\[1\]\[0\] must be a tensor; got NoneType"),
        # Its first steps would be taken for the last.
        (lambda last, hidden: (last.repeat(1, 2, 1), hidden), ValueError, r"shape \(3, 3, 12\); got \(3, 6, 12\)"),
        (lambda last, hidden: (last[:1], hidden), ValueError, r"state\[1\]\[0\] must have shape .*; got \(1, 3, 12\)"),
    ],
)
def test_bad_states(bad, kind, message):
    model, tokens = make()
    first, second = model.initial_state(3)
    with pytest.raises(kind, match=message):
        model(tokens, [first, bad(*second)])
    with pytest.raises(kind, match=message):
        model.step(tokens[:, 0], [first, bad(*second)])
    with pytest.raises(TypeError, match="state must be a list with a part for each block; got a tensor"):
        model(tokens, torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": torch.zeros(1, 0, dtype=torch.long)}, "at least one token; got shape \\(1, 0\\)"),
        ({"prompt": torch.zeros(0, 3, dtype=torch.long)}, "at least one token; got shape \\(0, 3\\)"),
        ({"prompt": torch.zeros(4, dtype=torch.long)}, "prompt must have shape \\(B, T\\); got \\(4,\\)"),
        ({"length": -1}, "length must be at least 0; got -1"),
        ({"temperature": -0.5}, "temperature must be finite and at least 0; got -0.5"),
        ({"temperature": math.nan}, "temperature must be finite and at least 0; got nan"),
        ({"top_k": 0}, "top_k must be at least 1; got 0"),
    ],
)
def test_bad_generation(arguments, message):
    model, tokens = make()
    with pytest.raises(ValueError, match=message):
        model.generate(**{"prompt": tokens, "length": 5, **arguments})


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
@torch.no_grad()
def test_gpu_generates_by_a_graph_what_steps_give(cell):
    model, tokens = make(cell, torch.float32)
    model, tokens = model.cuda(), tokens.cuda()
    for temperature in (0, 1):
        found = list(
            model.generate(tokens, 20, temperature=temperature, generator=torch.Generator("cuda").manual_seed(1))
        )
        generator, (logits, state) = torch.Generator("cuda").manual_seed(1), model(tokens)
        logits = logits[:, -1]
        for token in found:
            assert torch.equal(token, draw(logits, temperature, None, generator))
            logits, state = model.step(token, state)
