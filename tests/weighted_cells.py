"""Cells for recurrences with recurrent weights, each with an independently written step, their inputs and calls."""

import torch
from torch.nn import functional as F

import ostinato


@ostinato.recurrence
def peephole(state, i, f, g, o, p_i, p_f, p_o):  # Gers and Schmidhuber (2000)
    _, c = state
    c_next = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(g)
    return torch.sigmoid(o + p_o * c_next) * torch.tanh(c_next), c_next


@ostinato.recurrence
def gru(h, r, z, b, n):  # as torch.nn's: the last product is gated, and has its own bias
    z = torch.sigmoid(z)
    return z * h + (1 - z) * torch.tanh(n + torch.sigmoid(r) * b)


@ostinato.recurrence
def janet(h, f, c):  # van der Westhuizen and Lasenby, arXiv 1804.04849
    return torch.sigmoid(f) * h + (1 - torch.sigmoid(f - 1)) * torch.tanh(c)


@ostinato.recurrence
def elman(h, x):
    return torch.tanh(x)


class Spike(torch.autograd.Function):
    """A step function with the gradient of a smooth one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + 4 * x * x)


@ostinato.recurrence
def spiking(state, x):  # leaky integrate and fire; the weights multiply the spikes
    spike, potential = state
    potential = 0.9 * potential * (1 - spike.detach()) + x
    return Spike.apply(potential - 1), potential


@ostinato.recurrence(states=4)
def four_states(state, i, f, z, o):  # like the sLSTM of Beck et al. (2024), but smooth for any state
    _, c, n, m = state
    kept = F.logsigmoid(f) + m
    m = torch.logaddexp(kept, i)
    i, f = torch.exp(i - m), torch.exp(kept - m)
    c, n = f * c + i * torch.tanh(z), f * n + i
    return torch.sigmoid(o) * c / torch.sqrt(1 + n * n), c, n, m


# The same cells once more, with the state as a tuple and without PyTorch's sigmoid.
def logistic(x):
    return 1 / (1 + torch.exp(-x))


def peephole_step(state, i, f, g, o, p_i, p_f, p_o):
    c = state[1] / (1 + torch.exp(-f - p_f * state[1])) + g.tanh() / (1 + torch.exp(-i - p_i * state[1]))
    return c.tanh() / (1 + torch.exp(-o - p_o * c)), c


def gru_step(state, r, z, b, n):
    n = torch.tanh(n + logistic(r) * b)
    return (n + logistic(z) * (state[0] - n),)


def janet_step(state, f, c):
    return (logistic(f) * state[0] + logistic(1 - f) * c.tanh(),)


def elman_step(state, x):
    return (1 - 2 / (1 + torch.exp(2 * x)),)


def spiking_step(state, x):
    spike, potential = state
    potential = 0.9 * potential * (1 - spike.detach()) + x
    smooth = torch.atan(2 * (potential - 1)) / 2  # the gradient is its derivative
    return (potential > 1).to(x.dtype) + smooth - smooth.detach(), potential


def four_states_step(state, i, f, z, o):
    _, c, n, m = state
    old, new = torch.exp(m) * logistic(f), torch.exp(i)
    c, n = (old * c + new * (2 * logistic(2 * z) - 1)) / (old + new), (old * n + new) / (old + new)
    return logistic(o) * c * (1 + n**2) ** -0.5, c, n, torch.log(old + new)


# The recurrence, its step, which of its arguments are sequences, and how many of them have products added.
CELLS = {
    "peephole": (peephole, peephole_step, (True,) * 4 + (False,) * 3, 4),
    "gru": (gru, gru_step, (True, True, False, True), 3),
    "janet": (janet, janet_step, (True, True), 2),
    "elman": (elman, elman_step, (True,), 1),
    "spiking": (spiking, spiking_step, (True,), 1),
    "four states": (four_states, four_states_step, (True,) * 4, 4),
}


def inputs(cell, batch, length, width, sequences=None, dtype=torch.float64, device="cpu", heads=1):
    """Draw the weight, the arguments, and the initial states; with several heads, the weight is that of each."""
    function, _, kinds, products = CELLS[cell]
    columns = width // heads
    weight = torch.randn(heads, products * columns, columns) / columns**0.5
    weight = weight[0] if heads == 1 else weight
    arguments = [torch.randn(batch, length, width) if kind else torch.randn(width) for kind in kinds]
    h0 = [torch.randn(batch if sequences is None else sequences, width) for _ in range(function.states)]
    weight, *others = (x.to(device, dtype).requires_grad_() for x in (weight, *arguments, *h0))
    return weight, others[: len(kinds)], others[len(kinds) :]


def call(cell, weight, arguments, h0, **options):
    """Return the states and the final states in one tuple; initial states are zero if ``h0`` is empty."""
    function = CELLS[cell][0]
    initial = None if not h0 else tuple(h0) if function.states > 1 else h0[0]
    results = function(*arguments, weight_hh=weight, h0=initial, **options)
    return (*results[0], *results[1]) if function.states > 1 else results


def dense(weight, products):
    """The matrix, (products * D, D), with each head's weights on its diagonal."""
    gates = weight.unflatten(1, (products, -1)).unbind(1)
    return torch.cat([torch.block_diag(*gate) for gate in gates])
