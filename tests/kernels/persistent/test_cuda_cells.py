"""The CUDA cells of RNN, GRU and LSTM, compiled for the CPU in float64, against their equations and autograd."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from ostinato.kernels.persistent.cuda.heuristics import cells as heuristics
from ostinato.kernels.persistent.cuda.source import cell_code

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


# The equations of torch.nn's layers: the next states, given the states, the inputs and the products.


def rnn_tanh(before, x, s):
    return torch.tanh(x + s)


def rnn_relu(before, x, s):
    return torch.relu(x + s)


def gru(before, x, s):
    r, z = torch.sigmoid(x[:2] + s[:2])
    n = torch.tanh(x[2] + r * s[2])
    return (1 - z) * n + z * before


def lstm(before, x, s):
    i, f, g, o = x + s
    c = torch.sigmoid(f) * before[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.stack([torch.sigmoid(o) * torch.tanh(c), c])


# The equation, the numbers of states and of gates, and whether derivatives take x as left by forward(), or the state.
CELLS = {
    "rnn_tanh": (rnn_tanh, 1, 1, False),
    "rnn_relu": (rnn_relu, 1, 1, False),
    "gru": (gru, 1, 3, True),
    "lstm": (lstm, 2, 4, True),
}

DEFINITIONS = """
#include <cmath>
#define __device__
using Compute = double;
static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
static double hyperbolic_tangent(double x) { return std::tanh(x); }
"""

FUNCTIONS = """
extern "C" {
int constants[] = {Cell::STATES, Cell::PRODUCTS, Cell::INPUTS, Cell::PARAMETERS};
int derivatives = Cell::DERIVATIVES, gradients = Cell::GRADIENTS;
int of_product(int gate) { return Cell::of_product(gate); }
void forward(const double* before, double* x, const double* s, double* after) {
    Cell::forward(before, x, s, nullptr, after);
}
void differentiate(const double* before, const double* after, const double* x, double* slope) {
    Cell::differentiate(before, after, x, nullptr, slope);
}
void pull(const double* slope, const double* grad, double* of_states, double* of_arguments) {
    Cell::pull(slope, grad, of_states, of_arguments);
}
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A function that compiles a cell, and loads it."""
    folder = tmp_path_factory.mktemp("cells")

    def load(cell):
        text = DEFINITIONS + cell_code(heuristics.CELLS[cell]) + FUNCTIONS
        source, library = folder / f"{cell}.cpp", folder / f"{cell}.so"
        source.write_text(text)
        subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", source, "-o", library], check=True)
        return ctypes.CDLL(str(library))

    return load


def array(x):
    return (ctypes.c_double * x.numel())(*x.flatten().tolist())


def unwritten(count):
    return (ctypes.c_double * count)(*[float("nan")] * count)


@pytest.mark.parametrize("cell", CELLS)
def test_cells_compute_their_equation_and_its_derivatives(cell, compiled):
    equation, states, gates, takes_x = CELLS[cell]
    library = compiled(cell)
    assert [*(ctypes.c_int * 4).in_dll(library, "constants")] == [states, gates, gates, 0]
    record = heuristics.CELLS[cell]  # by which geometries are chosen
    assert [record.states, record.products, record.inputs, record.parameters] == [states, gates, gates, 0]
    derivatives, gradients = (ctypes.c_int.in_dll(library, name).value for name in ("derivatives", "gradients"))
    assert [record.derivatives, record.gradients] == [derivatives, gradients]
    torch.manual_seed(0)
    for scale in (0, 1, 1, 1, 1, 100):  # all zeros, and saturated, too
        leaves = [(scale * torch.randn(n, dtype=torch.float64)).requires_grad_() for n in (states, gates, gates)]
        (before, x, s), grad = leaves, torch.randn(states, dtype=torch.float64)
        wanted = equation(*leaves)
        of_states, of_x, of_s = torch.autograd.grad(wanted, leaves, grad, allow_unused=True, materialize_grads=True)

        sums, after = array(x), unwritten(2)
        library.forward(array(before), sums, array(s), after)
        assert after[:states] == pytest.approx(wanted.tolist(), rel=1e-12)

        slope, found_of_states, found = unwritten(derivatives), unwritten(states), unwritten(gradients)
        library.differentiate(array(before), after, sums if takes_x else after, slope)
        library.pull(slope, array(grad), found_of_states, found)
        assert found_of_states[:] == pytest.approx(of_states.tolist(), rel=1e-10, abs=1e-15)
        assert found[-gates:] == pytest.approx(of_x.tolist(), rel=1e-10, abs=1e-15)
        products = [found[library.of_product(gate)] for gate in range(gates)]
        assert products == pytest.approx(of_s.tolist(), rel=1e-10, abs=1e-15)
