"""Wrong arguments of RNN, GRU and LSTM, and the errors that name them."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ostinato
from comparisons import same_bits
from recurrent_layers import CELLS, by, flat, make, pruned, twin

BAD = {
    "rank": lambda: (torch.randn(2, 3, 4, 5),),
    "width": lambda: (torch.randn(3, 2, 6),),
    "dtype": lambda: (torch.randn(3, 2, 5).double(),),
    "integers": lambda: (torch.ones(3, 2, 5).long(),),
    "state of another batch": lambda: (torch.randn(3, 2, 5), torch.zeros(1, 3, 32)),
    "state without a batch": lambda: (torch.randn(3, 2, 5), torch.zeros(1, 32)),
    "state of another dtype": lambda: (torch.randn(3, 2, 5), torch.zeros(1, 2, 32).double()),
    "state on another device": lambda: (torch.randn(3, 2, 5), torch.zeros(1, 2, 32, device="meta")),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_as_by_torch(bad):
    layer = pruned("GRU", 5, 32)
    arguments = BAD[bad]()
    with torch.no_grad():
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            twin(layer)(*arguments)
        with pytest.raises(theirs.type) as ours:
            layer(*arguments)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("shape", [(1, 3, 32), (2, 2, 32), (1, 2, 33)])
def test_a_state_of_an_lstm_of_another_shape_is_refused_as_by_torch(steps, which, shape):
    layer, states = ostinato.LSTM(5, 32), [torch.zeros(1, 2, 32), torch.zeros(1, 2, 32)]
    states[which] = torch.zeros(shape)
    x = torch.randn(steps, 2, 5)
    with pytest.raises(RuntimeError) as theirs:
        nn.LSTM(5, 32)(x, tuple(states))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
            layer(x, tuple(states))


@pytest.mark.parametrize("grad", [False, True])
def test_states_of_an_lstm_are_not_taken_for_the_biases_of_one_before(grad):
    """Whose call was checked: kernels would read beyond the ends of the states."""
    x = torch.randn(40, 9, 5, dtype=torch.float64)
    states = tuple(nn.Parameter(torch.randn(4 * 8, dtype=torch.float64)) for _ in range(2))
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            ostinato.LSTM(5, 8, dtype=torch.float64)(x)
        with pytest.raises(RuntimeError, match="hx and cx should also be 3-D"):
            ostinato.LSTM(5, 8, bias=False, dtype=torch.float64)(x, states)


@pytest.mark.parametrize("lengths", [(3,), (3, 3), (3, 2)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_packed_call_of_an_lstm_that_does_not_fit_is_refused(lengths, grad):
    """torch.nn's LSTM does not check it, and reads beyond the ends of tensors."""
    layer, batch = ostinato.LSTM(5, 8), len(lengths)

    def packed(features, dtype=torch.float32):
        return pack_sequence([torch.randn(length, features, dtype=dtype) for length in lengths])

    with torch.set_grad_enabled(grad):
        for features in (4, 6):
            with pytest.raises(RuntimeError, match=rf"must be equal to input_size. Expected 5, got {features}"):
                layer(packed(features))
        with pytest.raises(ValueError, match=r"input dtype \(torch.float64\) does not match"):
            layer(packed(5, torch.float64))
        for which in (0, 1):
            for shape in ((1, batch + 1, 8), (2, batch, 8), (1, batch, 7), (1, batch, 9)):
                states = [torch.zeros(1, batch, 8), torch.zeros(1, batch, 8)]
                states[which] = torch.zeros(shape)
                expected = rf"\[{which}\] size \(1, {batch}, 8\), got \[{', '.join(map(str, shape))}\]"
                with pytest.raises(RuntimeError, match=f"Expected hidden{expected}"):
                    layer(packed(5), tuple(states))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_state_of_another_batch_is_refused_with_resets_too(steps):
    layer, resets = ostinato.GRU(5, 8), torch.zeros(steps, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=r"Expected hidden size \(1, 3, 8\), got \[1, 1, 8\]"):
        layer(torch.zeros(steps, 3, 5), torch.zeros(1, 1, 8), resets=resets)


STATE = torch.zeros(1, 2, 8)
NESTED = torch.nested.nested_tensor([torch.randn(4, 3), torch.randn(7, 3)], layout=torch.jagged)
ONE, TWO = "hx must be a tensor; got ", "hx must be a tuple of two tensors, h and c; got "
WRONG_TYPES = {
    "text": ("GRU", "x", None, "input must be a tensor or a PackedSequence; got str"),
    "a list": ("LSTM", [STATE], None, "input must be a tensor or a PackedSequence; got list"),
    "nested": ("GRU", NESTED, None, "input must be dense or packed; got a nested tensor, which pack_sequence.* packs"),
    "none": ("RNN", None, None, "input must be a tensor or a PackedSequence; got NoneType"),
    "a state of text": ("GRU", torch.zeros(3, 2, 5), "x", ONE + "str"),
    "a state in a tuple": ("GRU", torch.zeros(3, 2, 5), (STATE,), ONE + "a tuple of Tensor"),
    "two states": ("RNN", torch.zeros(3, 2, 5), (STATE, STATE), ONE + "a tuple of Tensor, Tensor"),
    "one state": ("LSTM", torch.zeros(3, 2, 5), STATE, TWO + "Tensor"),
    "half a state": ("LSTM", torch.zeros(3, 2, 5), (STATE, None), TWO + "a tuple of Tensor, NoneType"),
}


@pytest.mark.parametrize("wrong", WRONG_TYPES)
def test_arguments_of_other_types_are_named(wrong):
    cell, x, hx, message = WRONG_TYPES[wrong]
    for resets in (None, torch.zeros(3, 2, dtype=torch.bool)):
        with pytest.raises(TypeError, match=f"^{message}$"):
            make(cell, 5, 8)(x, hx, resets=resets)


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_a_step_from_what_is_no_state_is_refused(cell):
    for state in (3, "x"):
        with pytest.raises(TypeError, match=f"^state must be a tensor, or h and c .*; got {type(state).__name__}$"):
            make(cell, 5, 8).step(torch.zeros(2, 5), state)


BAD_STEPS = {
    "integers": (TypeError, "x", lambda x, state: (x.long(), state)),
    "another dtype": (TypeError, "x", lambda x, state: (x.double(), state)),
    "sparse": (TypeError, "x", lambda x, state: (x.to_sparse(), state)),
    "another device": (ValueError, "x", lambda x, state: (x.to("meta"), state)),
    "a state of another dtype": (TypeError, "state", lambda x, state: (x, [part.double() for part in state])),
    "a state of integers": (TypeError, "state", lambda x, state: (x, [part.long() for part in state])),
    "a state on another device": (ValueError, "state", lambda x, state: (x, [part.to("meta") for part in state])),
    "a state of three": (TypeError, "state", lambda x, state: (x, [state[0]] * 3)),
    "a state of none": (TypeError, "state", lambda x, state: (x, [None] * len(state))),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
@pytest.mark.parametrize("bad", BAD_STEPS)
def test_what_is_wrong_with_a_step_is_named(bad, cell, grad):
    kind, name, change = BAD_STEPS[bad]
    layer = make(cell, 5, 8)
    x, state = change(torch.randn(2, 5), [torch.zeros(1, 2, 8)] * (2 if cell == "LSTM" else 1))
    state = state[0] if len(state) == 1 and state[0] is not None else tuple(state)
    with torch.set_grad_enabled(grad), pytest.raises(kind, match=f"^{name} must "):
        layer.step(x, state)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_a_parameter_replaced_by_a_smaller_one_or_none_is_an_error(cell, name):
    """Kernels would read beyond its end."""
    layer = make(cell, 5, 8)
    smaller = nn.Parameter(getattr(layer, name)[:3].detach())
    for other, error, message in ((smaller, ValueError, "have shape"), (None, TypeError, "be a tensor; got None")):
        setattr(layer, name, other)
        for run in (layer.step, lambda x: layer(x[None]), lambda x: layer(x.expand(40, 2, 5))):
            with torch.no_grad(), pytest.raises(error, match=f"{name} must {message}"):
                run(torch.randn(2, 5))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("name", "value"), [("bias", False), ("num_layers", 2), ("bidirectional", True)])
def test_a_size_that_is_changed_after_construction_is_named(cell, name, value):
    layer = make(cell, 5, 8)
    setattr(layer, name, value)
    kind = type(layer).__name__
    for steps in (1, 40):
        with torch.no_grad(), pytest.raises(ValueError, match=f"{name}.* must be those that {kind} was made with"):
            layer(torch.randn(steps, 2, 5))


@pytest.mark.parametrize("kind", [ostinato.RNN, ostinato.GRU, ostinato.LSTM, ostinato.MinGRU, ostinato.RGLRU])
@pytest.mark.parametrize("name", ["forward", "step"])
def test_an_unknown_argument_is_of_no_private_class(kind, name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'lengths'"):
        getattr(kind(8, 8), name)(torch.randn(2, 8), lengths=None)


@pytest.mark.parametrize("name", ["GRU", "HGRN", "RGLRU", "MinGRU", "MinGRUCell"])
def test_an_unknown_argument_of_a_constructor_is_of_no_private_class(name):
    with pytest.raises(TypeError, match=rf"^({name}\.)?__init__\(\) got an unexpected keyword argument 'lengths'"):
        getattr(ostinato, name)(8, 8, lengths=None)
    with pytest.raises(TypeError, match=r"^forward\(\) got an unexpected keyword argument 'lengths'"):
        getattr(ostinato, name)(8, 8)(torch.randn(2, 8), lengths=None)


@pytest.mark.parametrize("sizes", [[2, 3], [3, 1], [3, 2, 2], [2, 0, 3]])
def test_a_packed_sequence_that_does_not_fit_its_rows(sizes):
    packed = PackedSequence(torch.randn(5, 7), torch.tensor(sizes))
    with torch.no_grad(), pytest.raises(ValueError, match=r"input\.batch_sizes must be positive, never rise"):
        pruned("GRU", 7, 32)(packed)


@pytest.mark.parametrize("cell", [ostinato.GRU, ostinato.MinGRU, ostinato.SRU])
@pytest.mark.parametrize("name", ["sorted_indices", "unsorted_indices"])
def test_a_packed_sequence_whose_order_is_of_others(cell, name):
    indices = {"sorted_indices": torch.tensor([1, 0]), "unsorted_indices": torch.tensor([1, 0])}
    indices[name] = torch.tensor([0])
    packed = PackedSequence(torch.randn(80, 7), torch.full((40,), 2), **indices)
    with pytest.raises(ValueError, match=f"input.{name} must have an index for each of 2 sequences; got 1"):
        cell(7, 32)(packed, torch.zeros(1, 2, 32))


@by("reference", "the CPU's")
@pytest.mark.parametrize("cell", [ostinato.GRU, ostinato.MinGRU])
def test_batch_sizes_that_change_between_calls(cell, kernels):
    """What is computed from them is computed once, until they change."""
    torch.manual_seed(0)
    layer, sizes = cell(7, 32, bidirectional=True), torch.tensor([3, 3, 2])
    x = torch.randn(8, 7)
    for now in ([3, 3, 2], [4, 2, 2], [3, 3, 2]):
        sizes.copy_(torch.tensor(now))
        found = layer(PackedSequence(x, sizes))
        expected = layer(PackedSequence(x, torch.tensor(now)))
        assert same_bits(flat(found), flat(expected))
    sizes.numpy()[2] = 3  # which no version counter tells
    with pytest.raises(ValueError, match=r"add up to its 8 rows; got \[3, 3, 3\]"):
        layer(PackedSequence(x, sizes))
