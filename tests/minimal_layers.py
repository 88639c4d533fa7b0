"""Forward and backward pass of minimal layers on a given backend, as the tests of kernels call them."""

from ostinato.kernels.recurrence.linear.layer import layer_scan, layer_scan_backward
from ostinato.minimal.recurrences import GATES, recurrence_of

__all__ = ["GATES", "layer", "layer_backward"]


def layer(backend, pre, bias, h0, offsets, cell, candidate, batch_first, directions, resets=None):
    recurrence = recurrence_of(cell, candidate, bias is not None)
    return layer_scan(pre, bias, h0, offsets, resets, recurrence, batch_first, directions, backend)


def layer_backward(
    backend, pre, bias, h0, h, grad_h, grad_last, offsets, cell, candidate, batch_first, directions, resets=None
):
    settings = recurrence_of(cell, candidate, bias is not None), batch_first, directions, backend
    grads = layer_scan_backward(pre, bias, h0, offsets, resets, *settings, h, grad_h, grad_last)
    return grads[0], None if bias is None else grads[1], None if h0 is None else grads[2]
