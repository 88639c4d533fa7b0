"""The functions of the CUDA backend: they bring tensors into layouts that the kernel reads, and launch it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda.nvrtc import address, empty
from ostinato.kernels.scan import Gradients, Order
from ostinato.kernels.scan.cuda.launch import Scan
from ostinato.kernels.scan.cuda.problem import Problem


def along_channels(x: Tensor) -> Tensor:
    """x, (B, T, D), or a copy, with contiguous channels."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _along_time(x: Tensor) -> Tensor:
    """x, or a copy, stored as a (B, D, T) tensor whose batch and channel dimensions can be merged."""
    if x.stride(1) == 1 and x.stride(0) == x.shape[2] * x.stride(2):
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _is_time_contiguous(x: Tensor, order: Order) -> bool:
    """Whether x, (B, T, D), is stored as (B, D, T), which the kernel reads in place in a plain order only."""
    return order.is_plain and x.stride(1) == 1 and x.stride(2) != 1 and x.shape[1] > 1 and x.shape[2] > 1


def states_like(x: Tensor, order: Order) -> Tensor:
    """An empty tensor of the shape of `x`: time-contiguous if `x` is, else contiguous."""
    if _is_time_contiguous(x, order):
        return x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)
    return x.new_empty(x.shape)


def last_state(b: Tensor, h0: Tensor | None, order: Order, zero: float) -> Tensor:
    """The tensor to which the kernel writes the last state of each sequence."""
    if order.cu_seqlens is None:
        return b.new_empty(b.shape[0], b.shape[2])
    # The last state of an empty sequence is its initial state; the kernel does not write it.
    return b.new_full((order.sequences(b), b.shape[2]), zero) if h0 is None else h0.clone()


class Element(NamedTuple):
    """The operation of a scan: a struct of ``elements.cuh``, or of generated code."""

    name: str
    code: str = ""
    gradient: "Callable[[], Element] | None" = None  # the element of the backward pass


_LINEAR_BACKWARD, _LOG_LINEAR_BACKWARD = Element("LinearScanBackward"), Element("LogLinearScanBackward")
_LINEAR = Element("LinearScan", gradient=lambda: _LINEAR_BACKWARD)
_LOG_LINEAR = Element("LogLinearScan", gradient=lambda: _LOG_LINEAR_BACKWARD)


def prepare_scan(
    element: Element,
    like: Tensor,
    strides: tuple[tuple[int, ...], ...],
    outputs: int,
    order: Order,
    parameters: Sequence[Tensor] = (),
    by_time: bool = False,
) -> Scan:
    """The scan over inputs of the shape and dtype of `like`, (B, T, D), with the given strides.

    There are `outputs` outputs, contiguous as (B, T, D), or as (B, D, T) if `by_time`.
    """
    cu_seqlens, resets, reverse = order
    return _prepare_scan(
        element,
        like.dtype,
        like.get_device(),
        like.shape,
        strides,
        outputs,
        reverse,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        None if resets is None else resets.stride(),
        len(parameters),
        parameters[0].dtype if parameters else None,
        by_time,
    )


@functools.lru_cache(maxsize=4096)
def _prepare_scan(
    element: Element,
    dtype: torch.dtype,
    device: int,
    shape: tuple[int, int, int],
    strides: tuple[tuple[int, ...], ...],
    outputs: int,
    reverse: bool,
    sequences: int | None,
    resets: tuple[int, int] | None,
    parameters: int,
    parameter_dtype: torch.dtype | None,
    by_time: bool,
) -> Scan:
    batch, steps, channels = shape

    def gradient() -> Scan:
        """The scan of the backward pass, if the states' gradients are laid out like the states."""
        assert element.gradient is not None
        states = (steps * channels, 1, steps) if by_time else (steps * channels, channels, 1)
        inputs = *(strides[:1] if element is _LINEAR else strides), states, states
        options = reverse, sequences, resets, parameters, parameter_dtype, by_time
        return _prepare_scan(element.gradient(), dtype, device, shape, inputs, len(strides), *options)

    return Scan(
        Problem(
            element.name,
            dtype,
            device,
            batch * channels if by_time else batch,  # by time, each channel is a sequence of its own
            steps,
            1 if by_time else channels,
            tuple((channel if by_time else sequence, time, 0) for sequence, time, channel in strides),
            ((steps, 1, 0) if by_time else (steps * channels, channels, 0),) * outputs,
            reverse=reverse,
            packing="DENSE" if sequences is None else "CU_SEQLENS",
            sequences=sequences or 0,
            resets=None if resets is None else (*resets, 0),
            parameters=parameters,
            code=element.code,
        ),
        parameter_dtype,
        None if element.gradient is None else gradient,
    )


def _forward_scan(
    element: Element, a: Tensor, b: Tensor, h0: Tensor | None, order: Order, zero: float
) -> tuple[Tensor, Tensor]:
    by_time = _is_time_contiguous(b, order)
    lay_out = _along_time if by_time else along_channels
    a, b, h0 = lay_out(a), lay_out(b), None if h0 is None else h0.contiguous()
    h = torch.empty_like(b) if b.is_contiguous() else states_like(b, order)  # new_empty costs more
    h_last = last_state(b, h0, order, zero)
    scan = prepare_scan(element, b, (a.stride(), b.stride()), 1, order, by_time=by_time)
    addresses = a.data_ptr(), b.data_ptr(), h.data_ptr(), 0, address(h0), h_last.data_ptr(), 0
    scan.launch(h, addresses, order.cu_seqlens, order.resets)
    return h, h_last


def prepare_linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> Callable | None:
    """A fast path of :func:`linear_scan` for tensors of the same layouts, in a plain order.

    None if any of them must be copied first.
    """
    if not b.is_contiguous() or along_channels(a) is not a or (h0 is not None and not h0.is_contiguous()):
        return None
    scan = prepare_scan(_LINEAR, b, (a.stride(), b.stride()), 1, order)
    device, dtype, shape = b.get_device(), b.dtype, tuple(b.shape)
    batch, steps, channels = shape
    strides, last_shape = (steps * channels, channels, 1), (batch, channels)

    def run(a: Tensor, b: Tensor, h0: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
        if torch._C._cuda_getDevice() != device:
            return linear_scan(a, b, h0, order)
        h, h_last = empty(shape, strides, dtype), empty(last_shape, (channels, 1), dtype)
        initial = 0 if h0 is None else h0.data_ptr()
        scan.launch(h, (a.data_ptr(), b.data_ptr(), h.data_ptr(), 0, initial, h_last.data_ptr(), 0))
        return h, h_last

    return run


def _backward_scan(
    element: Element,
    coefficients: Sequence[Tensor],
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    order: Order,
) -> Gradients:
    by_time = _is_time_contiguous(h, order)
    h0 = None if h0 is None else h0.contiguous()
    grad_h_last = None if grad_h_last is None else grad_h_last.contiguous()
    lay_out = _along_time if by_time else along_channels
    inputs = [lay_out(x) for x in (*coefficients, h, h if grad_h is None else grad_h)]
    outputs = states_like(h, order), states_like(h, order)
    grad_h0 = None if h0 is None else last_state(h, grad_h_last, order, 0.0)
    strides = tuple([x.stride() for x in inputs])
    scan = prepare_scan(element, h, strides, 2, order, by_time=by_time)
    addresses = [x.data_ptr() for x in (*inputs, *outputs)]
    if grad_h is None:
        addresses[len(coefficients) + 1] = 0
    addresses += 0, address(grad_h_last), address(grad_h0), address(h0)
    scan.launch(h, addresses, order.cu_seqlens, order.resets)
    return *outputs, grad_h0


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
    return _forward_scan(_LINEAR, a, b, h0, order, 0.0)


def linear_scan_backward(
    a: Tensor, h: Tensor, h0: Tensor | None, grad_h: Tensor | None, grad_h_last: Tensor | None, order: Order
) -> Gradients:
    return _backward_scan(_LINEAR_BACKWARD, [a], h, h0, grad_h, grad_h_last, order)


def log_linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
    return _forward_scan(_LOG_LINEAR, a, b, h0, order, float("-inf"))


def log_linear_scan_backward(
    a: Tensor, b: Tensor, h: Tensor, h0: Tensor | None, grad_h: Tensor | None, grad_h_last: Tensor | None, order: Order
) -> Gradients:
    return _backward_scan(_LOG_LINEAR_BACKWARD, [a, b], h, h0, grad_h, grad_h_last, order)
