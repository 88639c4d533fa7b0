"""One recurrent layer and direction as a loop over time, forward and backward: the specification of every kernel.

Rows of tensors are laid out as in :class:`~ostinato.kernels.persistent.sequences.Sequences`.

Everything is computed in float32, or in float64 for float64; states are rounded to their dtype after every step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.persistent.arguments import Layer, Saved
from ostinato.kernels.persistent.defaults import (
    StepOfLayers,
    least_steps,
    make_plan,
    most_single_steps,
    small,
    step_of,
)
from ostinato.kernels.persistent.plan import Plan
from ostinato.kernels.persistent.sequences import Sequences

__all__ = [
    "make_plan",
    "least_steps",
    "keeps_gates",
    "forward",
    "backward",
    "gradients_of_biases",
    "previous",
    "small",
    "most_single_steps",
    "step_of",
    "StepOfLayers",
]


def keeps_gates(_: str) -> bool:
    """Whether forward overwrites `projected` with the pre-activations that backward takes as `pre`: it does not."""
    return False


def forward(
    layer: Layer, projected: Tensor, plan: Plan | None = None, keep_cell: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    r"""Run all steps of a layer; differentiable.

    With :math:`p = x W_{ih}^T + b_{ih}` and :math:`q = W_{hh} h_{t-1} + b_{hh}`, by ``cell``:

    - rnn_tanh, rnn_relu: :math:`h_t = \tanh(p + q)`, or :math:`\max(p + q, 0)`
    - gru: :math:`r, z = \sigma(p + q)`, :math:`n = \tanh(p_n + r q_n)`, :math:`h_t = (1 - z) n + z h_{t-1}`
    - lstm: :math:`i, f, o = \sigma(p + q)`, :math:`g = \tanh(p + q)`, :math:`c_t = f c_{t-1} + i g`,
      :math:`h_t = o \tanh(c_t)`

    Args:
        projected: (rows, gates * H), p.
        plan: ignored; for kernels.
        keep_cell: whether to return an LSTM's c.

    Returns:
        The output (rows, H); h_n (B, H); c_n (B, H) of an LSTM, else None; and, if it is kept, the cell state after
        every step, (rows, H) in float32 or float64, else None.
    """
    cell, weight_hh, bias_hh, _, h0, c0, sequences, _ = layer
    dtype, hidden = projected.dtype, weight_hh.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    weight = weight_hh.to(wide)
    bias = weight.new_zeros(len(weight)) if bias_hh is None else bias_hh.to(wide)
    zeros, resets = weight.new_zeros(sequences.batch, hidden), sequences.resets
    h, c = (zeros if state is None else state.to(wide) for state in (h0, c0))
    outputs, cells = [], []
    for step in sequences.steps(projected):
        live = step.stop - step.start
        if resets is not None:
            h, c = (torch.cat([x[:live].where(~resets[step, None], 0.0), x[live:]]) for x in (h, c))
        p, q = projected[step].to(wide), h[:live] @ weight.T + bias
        h_t, *c_t = advance(p, q, h[:live], c[:live], cell)
        if c_t:
            c = torch.cat([*c_t, c[live:]])
            cells += c_t
        outputs.append(h_t.to(dtype))
        h = torch.cat([outputs[-1].to(wide), h[live:]])
    c_n = c.to(dtype) if cell == "lstm" else None
    if sequences.reverse:
        outputs, cells = outputs[::-1], cells[::-1]
    return torch.cat(outputs), h.to(dtype), c_n, torch.cat(cells) if cells and keep_cell else None


def advance(p: Tensor, q: Tensor, h: Tensor, c: Tensor, cell: str) -> tuple[Tensor, ...]:
    """The states after a step, h and an LSTM's c, from the previous ones and the gates' pre-activations p and q."""
    if cell == "lstm":
        i, f, g, o = (p + q).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if cell == "gru":
        (p_r, p_z, p_n), (q_r, q_z, q_n) = p.chunk(3, 1), q.chunk(3, 1)
        r, z = (p_r + q_r).sigmoid(), (p_z + q_z).sigmoid()
        n = (p_n + r * q_n).tanh()
        return ((1 - z) * n + z * h,)
    return ((p + q).relu() if cell == "rnn_relu" else (p + q).tanh(),)


def backward(
    layer: Layer, saved: Saved, upstream: Sequence[Tensor | None], plan: Plan | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Backpropagation through all steps of :func:`forward`.

    Args:
        upstream: gradients of the output, h_n and c_n, None for zeros.

    Returns:
        The gradient of each gate's pre-activation, in `pre`'s dtype: for an RNN and an LSTM (rows, gates * H), in the
        order of the gates; for a GRU (rows, 4 * H), those of n's q, of r, of z and of n's p.
        grad_h0 (B, H) and, for an LSTM, grad_c0 (B, H), else None.
        Rows with the same sum as those of the first result, for :func:`gradients_of_biases`: here that result itself,
        in kernels partial sums.
    """
    cell, weight_hh, _, _, h0, c0, sequences, _ = layer
    (pre, candidate, h, c), (grad_output, grad_h_n, grad_c_n) = saved, upstream
    dtype, hidden = pre.dtype, weight_hh.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    weight = weight_hh.to(wide)
    before = None if c is None else previous(c, c0, sequences)
    if cell == "gru":
        before = previous(h, h0, sequences)
        weight = torch.cat([weight[2 * hidden :], weight[: 2 * hidden]])  # in the order of the gates' gradients
    dh, dc = (weight.new_zeros(sequences.batch, hidden) if x is None else x.to(wide) for x in (grad_h_n, grad_c_n))
    grads = pre.new_empty(len(pre), hidden * (1 if cell.startswith("rnn") else 4))
    for step in reversed(sequences.steps(pre)):
        live = step.stop - step.start
        a, q_n, c_t, earlier = (None if x is None else x[step].to(wide) for x in (pre, candidate, c, before))
        d = dh[:live] if grad_output is None else dh[:live] + grad_output[step].to(wide)
        gates, direct, dc_before = _step_back(a, q_n, c_t, earlier, d, dc[:live], cell)
        dc = torch.cat([dc_before, dc[live:]])
        grads[step] = torch.cat(gates, 1).to(dtype)
        recurrent = grads[step, : len(weight)].to(wide)
        dh = torch.cat([direct + recurrent @ weight, dh[live:]])
        if sequences.resets is not None:
            reset = sequences.resets[step, None]
            dh, dc = (torch.cat([x[:live].where(~reset, 0.0), x[live:]]) for x in (dh, dc))
    return grads, dh.to(dtype), dc.to(dtype) if cell == "lstm" else None, grads


def _step_back(
    a: Any, q_n: Any, c: Any, before: Any, d: Tensor, dc: Tensor, cell: str
) -> tuple[tuple[Tensor, ...], Tensor | float, Tensor]:
    """The gradients of a step's gates, of h before it, except for what passes through the weights, and of c before it.

    ``a`` and ``q_n`` are the step's rows of `pre` and `candidate`, ``before`` those of a GRU's h or an LSTM's c before
    it.
    """
    if cell == "lstm":
        i, f, g, o = a.chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        tanh_c = c.tanh()
        dc = dc + d * o * (1 - tanh_c**2)
        d_i, d_f, d_g = dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g**2)
        return (d_i, d_f, d_g, d * tanh_c * o * (1 - o)), 0.0, dc * f
    if cell == "gru":
        a_r, a_z, p_n = a.chunk(3, 1)
        r, z = a_r.sigmoid(), a_z.sigmoid()
        n = (p_n + r * q_n).tanh()
        d_n = d * (1 - z) * (1 - n**2)
        return (d_n * r, d_n * q_n * r * (1 - r), d * (before - n) * z * (1 - z), d_n), d * z, dc
    return (d.masked_fill(a <= 0, 0.0) if cell == "rnn_relu" else d * (1 - a**2),), 0.0, dc


def gradients_of_biases(totals: Tensor, dtype: torch.dtype, cell: str) -> tuple[Tensor, Tensor]:
    """The gradients of bias_ih and bias_hh, from the last result of :func:`backward`."""
    sums = totals.sum(0).to(dtype)
    if cell != "gru":
        return sums, sums.clone()
    hidden = len(sums) // 4
    return sums[hidden:].clone(), sums[: 3 * hidden].roll(-hidden)


def previous(rows: Tensor, first: Tensor | None, sequences: Sequences) -> Tensor:
    """The state before each step.

    Args:
        rows: (rows, H), the state after each step.
        first: (B, H), the state before a sequence's first step in the order of the recurrence, None for zeros.
    """
    batch, offsets, resets, reverse = sequences
    if resets is not None:
        return previous(rows, first, sequences._replace(resets=None)).masked_fill_(resets[:, None], 0.0)
    first = rows.new_zeros(batch, rows.shape[1]) if first is None else first.to(rows.dtype)
    if offsets is None:
        return torch.cat([rows[batch:], first] if reverse else [first, rows[:-batch]])
    steps = len(offsets) - 1
    offsets = offsets.long()
    step = torch.arange(steps, device=rows.device).repeat_interleave(offsets.diff(), output_size=len(rows))
    sequence = torch.arange(len(rows), device=rows.device) - offsets[step]
    before = step + 1 if reverse else step - 1
    begin, end = offsets[before.clamp(0, steps)], offsets[(before + 1).clamp(0, steps)]
    index = torch.where(sequence < end - begin, batch + begin + sequence, sequence)
    return torch.cat([first, rows]).index_select(0, index)
