"""Scans in plain PyTorch operations, for devices that have no kernels here.

The sequence is split into chunks of 16 steps.  All chunks are scanned in parallel, one step at a time, from the neutral
state; the chunks' aggregates, a sixteenth as many, are scanned recursively; then each chunk is corrected for its carry.
That is 16 * log16(T) short launches and 2T compositions.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.operators.export import loop
from ostinato.kernels.scan import Gradients, Order, reference

CHUNK = 16


class Semiring(NamedTuple):
    """The operations of a scan, their neutral elements, and the partial derivatives of a step, ``a*h + b``."""

    times: Callable[[Tensor, Tensor], Tensor]
    times_plus: Callable[[Tensor, Tensor, Tensor], Tensor]  # a*h + b
    one: float
    zero: float
    sequential: Callable[..., tuple[Tensor, Tensor]]
    partials: Callable[[Tensor, Any, Tensor], tuple[Tensor, Tensor, Tensor | float]]  # (a, b, h) -> by h, a and b


def _log_partials(a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The partial derivatives of logaddexp(a + h, b): the shares of exp(a + h), twice, and of exp(b) in their sum.

    They are not computed from the sum, which is rounded.  A state of exactly zero has no gradient.
    """
    is_zero = (a + h == -math.inf) & (b == -math.inf)
    log_ratio = torch.where(is_zero, 0.0, a + h) - torch.where(is_zero, 0.0, b)
    carried, added = log_ratio.sigmoid().masked_fill(is_zero, 0.0), (-log_ratio).sigmoid().masked_fill(is_zero, 0.0)
    return carried, carried, added


LINEAR = Semiring(
    *(torch.mul, lambda a, h, b: torch.addcmul(b, a, h), 1.0, 0.0),
    *(reference.linear_scan, lambda a, _, h: (a, h, 1.0)),
)
LOG = Semiring(
    *(torch.add, lambda a, h, b: torch.logaddexp(a + h, b), 0.0, -math.inf),
    *(reference.log_linear_scan, _log_partials),
)


def _chunked_scan(
    ring: Semiring, a: Tensor, b: Tensor, h0: Tensor, reverse: bool = False, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The scan of a and b, (B, T, D), over the semiring, from h0, (B, D); returns h and the last state."""
    if resets is not None:
        a, ring = a.masked_fill(resets[..., None], ring.zero), _with_absorbing_zero(ring)
    if reverse:
        h, h_last = _chunked_scan(ring, a.flip(1), b.flip(1), h0)
        return h.flip(1), h_last
    batch, length, width = a.shape
    if length <= CHUNK:
        return ring.sequential(a, b, h0)
    chunks = -(-length // CHUNK)
    pad = (0, 0, 0, chunks * CHUNK - length)
    A = F.pad(a, pad, value=ring.one).view(batch, chunks, CHUNK, width)
    B = F.pad(b, pad, value=ring.zero).view(batch, chunks, CHUNK, width)
    products, states = [A[:, :, 0]], [B[:, :, 0]]
    for t in range(1, CHUNK):
        products.append(ring.times(A[:, :, t], products[-1]))
        states.append(ring.times_plus(A[:, :, t], states[-1], B[:, :, t]))
    after, h_last = _chunked_scan(ring, products[-1], states[-1], h0)
    before = torch.cat((h0[:, None], after[:, :-1]), 1)
    h = ring.times_plus(torch.stack(products, 2), before[:, :, None], torch.stack(states, 2))
    return h.view(batch, chunks * CHUNK, width)[:, :length], h_last


def _with_absorbing_zero(ring: Semiring) -> Semiring:
    """The semiring with zero times anything equal to zero, NaN and infinity included."""

    def finite_where_zero(a: Tensor, x: Tensor) -> Tensor:
        # Finite states stay: if a is zero without a reset, its gradient needs them.
        return x.masked_fill((a == ring.zero) & ~x.isfinite(), ring.zero)

    def times(a: Tensor, x: Tensor) -> Tensor:
        return ring.times(a, finite_where_zero(a, x))

    def times_plus(a: Tensor, h: Tensor, b: Tensor) -> Tensor:
        return ring.times_plus(a, finite_where_zero(a, h), b)

    def sequential(a: Tensor, b: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        steps = [h0]
        for t in range(a.shape[1]):
            steps.append(times_plus(a[:, t], steps[-1], b[:, t]))
        return torch.stack(steps[1:], 1) if a.shape[1] else b, steps[-1]

    return ring._replace(times=times, times_plus=times_plus, sequential=sequential)


class TorchBackend:
    """A :class:`~ostinato.kernels.scan.Backend` of PyTorch operations around one scan function."""

    def __init__(
        self, scan: Callable[..., tuple[Tensor, Tensor]], compute_dtype: Callable[[Tensor], torch.dtype]
    ) -> None:
        self._scan = scan
        self.compute_dtype = compute_dtype

    def _run(self, ring: Semiring, a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
        dtype, resets = self.compute_dtype(b), order.resets
        a, b = a.to(dtype), b.to(dtype)
        packing = None if order.cu_seqlens is None else Packing.from_cu_seqlens(order.cu_seqlens)
        if packing is not None:
            a, b = packing.unpack(a[0], ring.one), packing.unpack(b[0], ring.zero)
            resets = None if resets is None else packing.unpack(resets[0, :, None], False)[..., 0]
        h0 = b.new_full((b.shape[0], b.shape[2]), ring.zero) if h0 is None else h0.to(dtype)
        h, h_last = self._scan(ring, a, b, h0, order.reverse, resets)
        return (h if packing is None else packing.pack(h)[None]), h_last

    def states_like(self, x: Tensor, _order: Order) -> Tensor:
        return x.new_empty(x.shape)

    def prepare_linear_scan(self, *_: Any) -> None:
        """Return None: preparing makes no scan here faster."""

    def linear_scan(self, a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
        h, h_last = self._run(LINEAR, a, b, h0, order)
        return _owned(h, b.dtype), _owned(h_last, b.dtype)

    def linear_scan_backward(
        self, a: Tensor, h: Tensor, h0: Tensor | None, grad_h: Tensor | None, grad_h_last: Tensor | None, order: Order
    ) -> Gradients:
        return self._run_backward(LINEAR, a, None, h, h0, grad_h, grad_h_last, order)

    def log_linear_scan(self, a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
        h, h_last = self._run(LOG, a, b, h0, order)
        return _owned(h, b.dtype), _owned(h_last, b.dtype)

    def log_linear_scan_backward(
        self,
        a: Tensor,
        b: Tensor,
        h: Tensor,
        h0: Tensor | None,
        grad_h: Tensor | None,
        grad_h_last: Tensor | None,
        order: Order,
    ) -> Gradients:
        return self._run_backward(LOG, a, b, h, h0, grad_h, grad_h_last, order)

    def _run_backward(
        self,
        ring: Semiring,
        a: Tensor,
        b: Tensor | None,
        h: Tensor,
        h0: Tensor | None,
        grad_h: Tensor | None,
        grad_h_last: Tensor | None,
        order: Order,
    ) -> Gradients:
        dtype = self.compute_dtype(a)

        def widened(x: Any) -> Any:
            return None if x is None else x.to(dtype)

        tensors = widened(a), widened(b), widened(h), widened(h0), widened(grad_h), widened(grad_h_last)
        *grads, grad_h0 = gradients_of_scan(ring, functools.partial(self._run, LINEAR), *tensors, order)
        return _owned(grads[0], a.dtype), _owned(grads[1], a.dtype), None if h0 is None else _owned(grad_h0, h0.dtype)


class Packing(NamedTuple):
    """Where the steps of packed sequences are stored: their rows in the packed tensor, and whether they exist.

    Both are (N, L), for N sequences of at most L steps.
    """

    rows: Tensor
    valid: Tensor

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> "Packing":
        """Sequences one after the other: sequence n has rows cu_seqlens[n] to cu_seqlens[n+1]."""
        lengths = cu_seqlens.diff()
        steps = torch.arange(int(lengths.max()) if len(lengths) else 0, device=cu_seqlens.device)
        return cls(cu_seqlens[:-1, None] + steps, steps < lengths[:, None])

    @classmethod
    def from_offsets(cls, offsets: Tensor) -> "Packing":
        """Time-major, as in ``PackedSequence``: step t has rows offsets[t] to offsets[t+1], longest sequence first."""
        batch = int(offsets[1] - offsets[0])
        rows = offsets[:-1] + torch.arange(batch, device=offsets.device)[:, None]
        return cls(rows, rows < offsets[1:])

    def unpack(self, packed: Tensor, fill: float) -> Tensor:
        """(rows, D) to (N, L, D), with `fill` where a sequence is shorter."""
        return self.masked(packed[self.rows.clamp(max=packed.shape[0] - 1)], fill)

    def masked(self, padded: Tensor, fill: float) -> Tensor:
        return torch.where(self.valid[..., None], padded, fill)

    def pack(self, padded: Tensor) -> Tensor:
        """(N, L, D) back to (rows, D)."""
        order = self.rows[self.valid].argsort()
        return padded[self.valid][order]


def shift(h: Tensor, h0: Tensor | None, reverse: bool, cu_seqlens: Tensor | None, zero: float = 0.0) -> Tensor:
    """The state before each step in scan order: h shifted by one step, and h0 where a sequence begins."""
    outside = h.new_full((h.shape[0], 1, h.shape[2]), zero)
    start = outside if h0 is None else h0.to(h.dtype)[:, None]
    if cu_seqlens is None:
        # Sliced only after the concatenation, as h may have no steps.
        return torch.cat((h, start), 1)[:, 1:] if reverse else torch.cat((start, h), 1)[:, :-1]
    before = torch.cat((h[:, 1:], outside) if reverse else (outside, h[:, :-1]), 1)
    steps = torch.arange(h.shape[1], dtype=cu_seqlens.dtype, device=h.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True)  # to which each step belongs
    first = steps == (cu_seqlens[1:][sequence] - 1 if reverse else cu_seqlens[:-1][sequence])
    return torch.where(first[:, None], start if h0 is None else start[sequence, 0], before)


def partials_of_steps(
    ring: Semiring, a: Tensor, b: Tensor | None, h: Tensor, h0: Tensor | None, order: Order
) -> tuple[Tensor, Tensor, Tensor | float]:
    """The partial derivatives of every step of a scan by the state before it, a and b."""
    before = zeroed(shift(h, h0, order.reverse, order.cu_seqlens, ring.zero), order.resets, ring.zero)
    return ring.partials(a, b, before)


def gradients_of_scan(
    ring: Semiring,
    scan: Callable[..., tuple[Tensor, Tensor]],
    a: Tensor,
    b: Tensor | None,
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    order: Order,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a, b and h0.  `scan` is a linear scan with the arguments of a backend's."""
    by_h, by_a, by_b = partials_of_steps(ring, a, b, h, h0, order)
    grad = torch.zeros_like(by_h) if grad_h is None else grad_h
    # The gradient that each step carries back to the state before it, by a scan in the opposite direction.
    offsets, opposite = zeroed(by_h * grad, order.resets), order._replace(reverse=not order.reverse)
    carried, grad_h0 = scan(by_h, offsets, grad_h_last, opposite)
    total = grad + shift(carried, grad_h_last, opposite.reverse, opposite.cu_seqlens)
    return total * by_a, total * by_b, grad_h0


def zeroed(x: Tensor, resets: Tensor | None, zero: float = 0.0) -> Tensor:
    return x if resets is None else x.masked_fill(resets[..., None], zero)


def _owned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of `dtype` that shares no memory with the inputs or another output."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _looped(
    ring: Semiring, a: Tensor, b: Tensor, h0: Tensor, reverse: bool, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scan as one loop over time steps in the graph of an exported program."""
    inputs = [a, b] if resets is None else [a, b, resets[..., None]]

    def step(states: list[Tensor], inputs: list[Tensor], _: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        a_t, b_t, *reset = inputs
        before = states[0].masked_fill(reset[0], ring.zero) if reset else states[0]
        h = ring.times_plus(a_t, before, b_t)
        return [h], h

    (h_last,), h = loop(step, [h0], [x.transpose(0, 1) for x in inputs], reverse=reverse)
    return h.transpose(0, 1), h_last


def at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the products of many coefficients in chunked scans: double precision for float32 and complex64.

    The rounding of float32 products near 1 is biased, and accumulates over time.  Not every other device has float64.
    """
    needs_double = x.dtype in (torch.float32, torch.complex64) and x.device.type in ("cpu", "cuda")
    return _double(x) if needs_double else at_least_float32(x)


def _double(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


CHUNKED = TorchBackend(_chunked_scan, _product_dtype)
LOOPED = TorchBackend(_looped, at_least_float32)  # a single graph node, whatever the number of steps
REFERENCE = TorchBackend(lambda ring, *args: ring.sequential(*args), _double)
