"""The NumPy cells against an independent float64 loop, and their two forms against each other."""

import itertools

import numpy as np
import pytest
import torch

import ostinato.numpy
from ostinato.numpy import MinGRUCell, MinGRUCellCUDA, MinLSTMCell, MinLSTMCellCUDA

CPU_CELLS = [MinGRUCell, MinLSTMCell]
CUDA_CELLS = [MinGRUCellCUDA, MinLSTMCellCUDA]
CELLS = CPU_CELLS + [pytest.param(cell, marks=pytest.mark.gpu) for cell in CUDA_CELLS]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected_states(cell, x_seq, h):
    """The paper's equations with linear candidates, in NumPy alone."""
    states = []
    for x in x_seq:
        gates = np.split(cell.weight @ x + cell.bias, cell.weight.shape[0] // cell.hidden_size)
        if len(gates) == 2:
            z = sigmoid(gates[0])
            h = (1 - z) * h + z * gates[1]
        else:
            f, i = sigmoid(gates[0]), sigmoid(gates[1])
            h = f / (f + i) * h + i / (f + i) * gates[2]
        states.append(h)
    return np.array(states)


@pytest.mark.parametrize("cell_type", CELLS)
def test_every_form_equals_the_equations(cell_type):
    rng = np.random.default_rng(0)
    cell = cell_type(input_size=10, hidden_size=20, seed=1)
    x_seq, h0 = rng.normal(size=(300, 10)), rng.normal(size=20)
    expected = expected_states(cell, x_seq, h0)
    sequential, parallel = cell.process_sequence(x_seq, h0), cell.process_sequence_parallel(x_seq, h0)
    assert sequential.dtype == parallel.dtype == np.float64
    np.testing.assert_allclose(sequential, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(parallel, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(cell.forward(x_seq[0], h0), expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(cell.forward(x_seq[0]), expected_states(cell, x_seq[:1], np.zeros(20))[0], atol=1e-12)


@pytest.mark.parametrize("cell_type", CELLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(cell_type, dtype):
    cell, x_seq = cell_type(4, 6, dtype=np.float32, seed=3), np.random.default_rng(2).normal(size=(3, 50, 4))
    calls = cell.process_sequence, cell.process_sequence_parallel, lambda x: cell.forward(x[:, 0])
    want = [call(x_seq) for call in calls]
    with torch.autocast("cuda" if cell_type in CUDA_CELLS else "cpu", dtype=dtype):
        for call, states in zip(calls, want, strict=True):
            np.testing.assert_array_equal(call(x_seq), states, strict=True)


@pytest.mark.parametrize("cell_type", CELLS)
@pytest.mark.parametrize("candidate", ["linear", "positive", "tanh"])
def test_parallel_equals_sequential_in_a_batch(cell_type, candidate):
    rng = np.random.default_rng(2)
    cell = cell_type(4, 6, candidate=candidate, seed=3)
    x_seq, h0 = rng.normal(size=(3, 50, 4)), rng.uniform(size=(3, 6))
    sequential = cell.process_sequence(x_seq, h0)
    np.testing.assert_allclose(cell.process_sequence_parallel(x_seq, h0), sequential, rtol=0, atol=1e-12)
    np.testing.assert_allclose(cell.process_sequence_parallel(x_seq[1], h0[1]), sequential[1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(cell.forward(x_seq[:, 0], h0), sequential[:, 0], rtol=0, atol=1e-12)
    split = cell.process_sequence_parallel(x_seq[:, 20:], sequential[:, 19])
    np.testing.assert_allclose(split, sequential[:, 20:], rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(("on_cpu", "on_cuda"), list(zip(CPU_CELLS, CUDA_CELLS, strict=True)))
def test_cuda_computes_the_same_model(on_cpu, on_cuda):
    cpu, cuda = on_cpu(64, 128, seed=4), on_cuda(64, 128, seed=4)
    np.testing.assert_array_equal(cpu.weight, cuda.weight)
    x_seq = np.random.default_rng(5).normal(size=(1000, 64))
    expected = cpu.process_sequence_parallel(x_seq)
    np.testing.assert_allclose(cuda.process_sequence_parallel(x_seq), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(cuda.process_sequence(x_seq[:50]), expected[:50], rtol=0, atol=1e-12)


def test_the_documents_example_runs():
    """The usage example this interface is made for, with only its import lines changed."""
    gru_cell = MinGRUCell(input_size=10, hidden_size=20)
    x_t = np.random.random(10)
    h_prev = np.zeros(20)
    h_t = gru_cell.forward(x_t, h_prev)
    x_seq = np.random.random((5, 10))
    h0 = np.zeros(20)
    h_out = gru_cell.process_sequence(x_seq, h0)
    h_out_parallel = gru_cell.process_sequence_parallel(x_seq, h0)
    np.testing.assert_allclose(h_t, expected_states(gru_cell, x_t[None], h_prev)[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(h_out, expected_states(gru_cell, x_seq, h0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(h_out_parallel, h_out, rtol=0, atol=1e-12)


def test_float32_is_float32_and_float64_is_not_rounded():
    x_seq = np.random.default_rng(6).normal(size=(40, 4))
    exact, single = MinGRUCell(4, 6, seed=7), MinGRUCell(4, 6, seed=7, dtype=np.float32)
    expected = exact.process_sequence_parallel(x_seq)
    states = single.process_sequence_parallel(x_seq.astype(np.float32))
    assert states.dtype == np.float32
    assert 0 < np.abs(states - expected).max() < 1e-6


def test_any_memory_layout_and_no_input_is_written_to():
    cell = MinGRUCell(4, 6, seed=8)
    x_seq, h0 = np.random.default_rng(9).normal(size=(30, 4)), np.ones(6)
    expected = cell.process_sequence(x_seq, h0)
    awkward = np.asfortranarray(x_seq[::-1])[::-1]
    awkward.flags.writeable = h0.flags.writeable = False
    np.testing.assert_array_equal(cell.process_sequence(awkward, h0), expected)
    np.testing.assert_array_equal(cell.process_sequence(x_seq.astype(">f8"), h0), expected)
    assert cell.process_sequence_parallel(x_seq[:0], h0).shape == (0, 6)


@pytest.mark.parametrize("cell_type", CELLS)
def test_one_step_seen_from_behind(cell_type):
    cell = cell_type(4, 6, seed=8)
    x_seq, h0 = np.random.default_rng(9).normal(size=(1, 1, 4)), np.ones((1, 6))
    expected = cell.process_sequence(x_seq, h0)
    for run in (cell.process_sequence, cell.process_sequence_parallel):
        np.testing.assert_allclose(run(x_seq[::-1, ::-1], h0[::-1]), expected, rtol=0, atol=1e-15)
        np.testing.assert_allclose(run(x_seq[0, ::-1], h0[0]), expected[0], rtol=0, atol=1e-15)
    np.testing.assert_allclose(cell.forward(x_seq[::-1, 0], h0[::-1]), expected[:, 0], rtol=0, atol=1e-15)
    narrow = cell_type(1, 6, seed=8)
    weight = narrow.weight
    narrow.weight = weight[:, ::-1]
    np.testing.assert_array_equal(narrow.weight, weight)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cell_type", CPU_CELLS)
@pytest.mark.parametrize(
    ("candidate", "dtype"),  # in float32 once, with both of its functions
    [("linear", np.float64), ("positive", np.float64), ("tanh", np.float64), ("tanh", np.float32)],
)
def test_gates_that_are_wide_open_or_shut(dtype, candidate, cell_type):
    cell = cell_type(1, 1, candidate=candidate, dtype=dtype)
    for pre in itertools.product([-2000, -30, 0, 30, 2000], repeat=len(cell.bias)):
        cell.weight, cell.bias = np.zeros_like(cell.weight), np.array(pre, float)
        x_seq, h0 = np.zeros((3, 1), dtype), np.ones(1, dtype)
        states = cell.process_sequence(x_seq, h0)
        assert states.dtype == dtype
        tolerance = 10 * np.finfo(dtype).eps
        np.testing.assert_allclose(states, cell.process_sequence_parallel(x_seq, h0), rtol=tolerance, atol=1e-37)
        np.testing.assert_allclose(cell.forward(x_seq[0], h0), states[0], rtol=0)


def test_weights_are_seen_and_replaced():
    cell = MinLSTMCell(2, 3, seed=10)
    assert cell.weight.shape == (9, 2)
    assert cell.bias.shape == (9,)
    assert np.abs(cell.weight).max() <= 3**-0.5
    np.testing.assert_array_equal(cell.weight, MinLSTMCell(2, 3, seed=10).weight)
    cell.weight, cell.bias = np.zeros((9, 2)), np.repeat([0.0, 0.0, 2.0], 3)
    np.testing.assert_allclose(cell.forward(np.ones(2), np.full(3, 4.0)), 3.0)  # half the state, half the candidate
    with pytest.raises(ValueError, match="read-only"):
        cell.weight[0] = 1
    with pytest.raises(ValueError, match=r"weight must have shape \(9, 2\); got \(2, 9\)"):
        cell.weight = np.zeros((2, 9))


@pytest.mark.parametrize("cell_type", CELLS)
def test_weights_that_were_read_stay_when_they_are_replaced(cell_type):
    cell = cell_type(2, 3, seed=10)
    before, x = cell.weight, np.ones(2)
    state = cell.forward(x)
    cell.weight = before + 1
    assert np.abs(cell.weight - before - 1).max() < 1e-12
    cell.weight = before
    np.testing.assert_array_equal(cell.forward(x), state)


def test_a_cell_says_what_it_is():
    cell = MinGRUCell(np.int64(4), np.int32(6), dtype="float32")
    assert repr(cell) == "MinGRUCell(4, 6, candidate='linear', dtype='float32')"


def test_bad_input_is_named():
    cell = MinGRUCell(4, 6)
    cases = [
        (lambda: cell.forward(np.zeros(5)), ValueError, r"x_t must have shape \(4,\) or \(B, 4\); got \(5,\)"),
        (lambda: cell.forward(np.zeros((2, 4)), np.zeros(6)), ValueError, r"h_prev must have shape \(2, 6\); got"),
        (lambda: cell.process_sequence(np.zeros(4)), ValueError, r"x_seq must have shape \(T, 4\) or \(B, T, 4\)"),
        (lambda: cell.process_sequence_parallel(np.zeros((5, 4)), np.zeros(4)), ValueError, r"h0 must have shape"),
        (lambda: cell.process_sequence(np.zeros((5, 4), int)), TypeError, "x_seq must be of a floating dtype; got int"),
        (lambda: cell.forward([[0.0] * 4, [0.0]]), ValueError, "x_t must be an array of a floating dtype; "),
        (lambda: cell.forward(torch.zeros(4, requires_grad=True)), TypeError, "x_t must be .*; Can't call numpy"),
        (lambda: MinGRUCell(4, 6, seed=-1), ValueError, "seed must be None, an integer .*; expected non-negative"),
        (lambda: MinGRUCell(4, 6, seed="0"), TypeError, "seed must be None, an integer from 0 on or a Generator; "),
        (lambda: MinGRUCell(0, 6), ValueError, "input_size must be at least 1; got 0"),
        (lambda: MinGRUCell(np.float64(4), 6), TypeError, "input_size must be an int; got float64"),
        (lambda: MinGRUCell(4, 6, candidate="relu"), ValueError, "candidate must be one of"),
        (lambda: MinGRUCell(4, 6, dtype=np.int32), TypeError, "dtype must be float32 or float64; got int32"),
        (lambda: MinGRUCell(4, 6, dtype="fp32"), TypeError, "dtype must be float32 or float64; got 'fp32'"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_cuda_cells_say_so():
    assert ostinato.numpy.CUDA_AVAILABLE is False
    for cell in CUDA_CELLS:
        with pytest.raises(RuntimeError, match=f"{cell.__name__} needs a CUDA device"):
            cell(10, 20)
