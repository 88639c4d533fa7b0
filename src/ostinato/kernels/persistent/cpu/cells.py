# mypy: disable-error-code="no-untyped-def"
"""The update of one unit of one sequence in the CPU's loops, forward and backward, for each cell.

Each cell has a function of its own: in a single one, Numba would compile every branch, and string comparisons.
"""

from ostinato.kernels.cpu.compiler import inline
from ostinato.kernels.cpu.elementary import cast, multiply_add, sigmoids, tanh_and_slope
from ostinato.kernels.cpu.intrinsics import restricted

load, store = restricted(
    *("p0", "p1", "p2", "p3", "s0", "s1", "s2", "s3", "h", "c", "out", "kept"),
    *("q", "before", "grad", "dh", "dc", "g0", "g1", "g2", "g3"),
)


# `arrays` are pointers and offsets of rows in them; gates are `pitch` apart in a row, and `padded` apart in the sums.


@inline
def _tanh(x):
    return tanh_and_slope(x)[0]


@inline
def _relu(x):
    return cast(0.0, x) if x < 0 else x


def _rnn_unit(activation):
    @inline
    def unit(keep, j, pitch, padded, arrays):
        projected, at_p, sums, at_s, h, _, at, output, _, at_out = arrays
        new = activation(load(projected, at_p + j, "p0") + load(sums, at_s + j, "s0"))
        if keep:
            store(projected, at_p + j, new, "p0")
        store(h, at + j, new, "h")
        store(output, at_out + j, new, "out")

    return unit


@inline
def _gru_unit(keep, j, pitch, padded, arrays):
    projected, at_p, sums, at_s, h, _, at, output, kept, at_out = arrays
    x0 = load(projected, at_p + j, "p0") + load(sums, at_s + j, "s0")
    x1 = load(projected, at_p + pitch + j, "p1") + load(sums, at_s + padded + j, "s1")
    p2, s2 = load(projected, at_p + 2 * pitch + j, "p2"), load(sums, at_s + 2 * padded + j, "s2")
    if keep:
        store(projected, at_p + j, x0, "p0")
        store(projected, at_p + pitch + j, x1, "p1")
        store(kept, at_out + j, s2, "kept")
    n = _tanh(multiply_add(sigmoids(x0)[0], s2, p2))
    new = multiply_add(sigmoids(x1)[0], load(h, at + j, "h") - n, n)
    store(h, at + j, new, "h")
    store(output, at_out + j, new, "out")


@inline
def _lstm_unit(keep, j, pitch, padded, arrays):
    projected, at_p, sums, at_s, h, c, at, output, kept, at_out = arrays
    x0 = load(projected, at_p + j, "p0") + load(sums, at_s + j, "s0")
    x1 = load(projected, at_p + pitch + j, "p1") + load(sums, at_s + padded + j, "s1")
    x2 = load(projected, at_p + 2 * pitch + j, "p2") + load(sums, at_s + 2 * padded + j, "s2")
    x3 = load(projected, at_p + 3 * pitch + j, "p3") + load(sums, at_s + 3 * padded + j, "s3")
    c_j = multiply_add(sigmoids(x1)[0], load(c, at + j, "c"), sigmoids(x0)[0] * _tanh(x2))
    new = sigmoids(x3)[0] * _tanh(c_j)
    if keep:
        store(projected, at_p + j, x0, "p0")
        store(projected, at_p + pitch + j, x1, "p1")
        store(projected, at_p + 2 * pitch + j, x2, "p2")
        store(projected, at_p + 3 * pitch + j, x3, "p3")
        store(kept, at_out + j, c_j, "kept")
    store(c, at + j, c_j, "c")
    store(h, at + j, new, "h")
    store(output, at_out + j, new, "out")


FORWARD_UNIT = {"rnn_tanh": _rnn_unit(_tanh), "rnn_relu": _rnn_unit(_relu), "gru": _gru_unit, "lstm": _lstm_unit}


# The gradients of the gates' pre-activations; dh keeps the part of h's gradient that does not pass through the weights.


@inline
def _slope_of_tanh(d, y):
    return multiply_add(-d * y, y, d)


@inline
def _slope_of_relu(d, y):
    return cast(0.0, y) if y <= 0 else d


def _rnn_backward_unit(slope):
    @inline
    def unit(j, pitch, inputs, outputs):
        output, at_output, _, _, _, _, _, grad, at_grad = inputs
        dh, at_dh, _, _, grads, at = outputs
        y = load(output, at_output + j, "p0")
        d = load(dh, at_dh + j, "dh") + load(grad, at_grad + j, "grad")
        store(grads, at + j, slope(d, y), "g0")
        store(dh, at_dh + j, cast(0.0, y), "dh")

    return unit


@inline
def _gru_backward_unit(j, pitch, inputs, outputs):
    pre, at_pre, candidate, before, at_before, _, at_row, grad, at_grad = inputs
    dh, at_dh, _, _, grads, at = outputs
    d = load(dh, at_dh + j, "dh") + load(grad, at_grad + j, "grad")
    q = load(candidate, at_row + j, "q")
    r, not_r = sigmoids(load(pre, at_pre + j, "p0"))
    z, not_z = sigmoids(load(pre, at_pre + pitch + j, "p1"))
    n, slope = tanh_and_slope(multiply_add(r, q, load(pre, at_pre + 2 * pitch + j, "p2")))
    d_n = d * not_z * slope
    store(grads, at + j, d_n * r, "g0")
    store(grads, at + pitch + j, d_n * q * (r * not_r), "g1")
    store(grads, at + 2 * pitch + j, d * (load(before, at_before + j, "before") - n) * (z * not_z), "g2")
    store(grads, at + 3 * pitch + j, d_n, "g3")
    store(dh, at_dh + j, d * z, "dh")


@inline
def _lstm_backward_unit(j, pitch, inputs, outputs):
    pre, at_pre, _, before, at_before, cells, at_row, grad, at_grad = inputs
    dh, at_dh, dc, at_dc, grads, at = outputs
    d = load(dh, at_dh + j, "dh") + load(grad, at_grad + j, "grad")
    x0 = load(pre, at_pre + j, "p0")
    i, not_i = sigmoids(x0)
    f, not_f = sigmoids(load(pre, at_pre + pitch + j, "p1"))
    g, slope_g = tanh_and_slope(load(pre, at_pre + 2 * pitch + j, "p2"))
    o, not_o = sigmoids(load(pre, at_pre + 3 * pitch + j, "p3"))
    tanh_c, slope_c = tanh_and_slope(load(cells, at_row + j, "c"))
    d_c = multiply_add(d * o, slope_c, load(dc, at_dc + j, "dc"))
    store(grads, at + j, d_c * g * (i * not_i), "g0")
    store(grads, at + pitch + j, d_c * load(before, at_before + j, "before") * (f * not_f), "g1")
    store(grads, at + 2 * pitch + j, d_c * i * slope_g, "g2")
    store(grads, at + 3 * pitch + j, d * tanh_c * (o * not_o), "g3")
    store(dc, at_dc + j, d_c * f, "dc")
    store(dh, at_dh + j, cast(0.0, x0), "dh")


BACKWARD_UNIT = {
    "rnn_tanh": _rnn_backward_unit(_slope_of_tanh),
    "rnn_relu": _rnn_backward_unit(_slope_of_relu),
    "gru": _gru_backward_unit,
    "lstm": _lstm_backward_unit,
}
