"""Calls of a recurrence with recurrent weights: launched, or on a GPU replayed as CUDA graphs once they repeat."""

import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ostinato.cuda_graphs.calls import MOST_STEPS, RepeatedCalls, worth_capturing
from ostinato.kernels.matmul.precision import layers_allow_tf32, product_switches
from ostinato.kernels.operators.eager import Prepared
from ostinato.kernels.persistent.backends import is_captured
from ostinato.kernels.persistent.modes import is_vmapped
from ostinato.kernels.recurrence.arguments import concatenated_states
from ostinato.kernels.recurrence.weighted.operator import weighted_recurrence
from ostinato.kernels.scan import Order

_CALLS = Prepared[RepeatedCalls]()


def run_all_steps(
    trace: str,
    weight_hh: Tensor,
    dtype: torch.dtype,
    sequences: Sequence[Tensor],
    parameters: Sequence[Tensor],
    initial: Sequence[Tensor],
    order: Order,
    backend: str,
) -> Sequence[Tensor]:
    """The states over time, (B, T, D) each, and the last states, (B, D) each, of a call that has been checked.

    Args:
        trace: the trace of the function for these kinds of arguments.
        weight_hh: (G*D, D), or (H, G*D/H, D/H) of H heads, whose products with the previous h are added to the first G
            arguments.
        dtype: the dtype of the results.
        sequences: the arguments over time, (B, T, D) each, of that dtype, or one tensor with all, (B, T, N*D).
        parameters: the arguments per channel, (D,) each, or one tensor with all, (P*D,).
        initial: the initial states, if any are given.
        order: how the steps follow one another.
        backend: see ``choose_backend``.
    """
    x, *inputs = *sequences, *parameters, *initial
    counts = len(sequences), len(parameters)
    # Inside vmap, a tensor does not tell whether a gradient is taken around it.
    training = torch.is_grad_enabled() and (is_vmapped() or any(y.requires_grad for y in (weight_hh, x, *inputs)))
    if torch.jit.is_tracing():  # records one value for all calls, and checks it against a call without gradients
        training = False
    run = functools.partial(_launch, trace, dtype, *counts, order._replace(resets=None), backend, training)
    if (repeated := _repeated_calls(run, weight_hh, x, inputs, order)) is not None:
        results = repeated.replay(cast(nn.Parameter, weight_hh), x, inputs, [weight_hh], order.resets, training)
        if results is not None:
            return results
    return run(x, inputs, [weight_hh], order.resets)


def _launch(
    trace: str,
    dtype: torch.dtype,
    sequences: int,
    parameters: int,
    order: Order,
    backend: str,
    training: bool,
    x: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    resets: Tensor | None,
) -> list[Tensor]:
    """Call the operator; `x` and `inputs` are the sequences, the parameters and the initial states, in this order."""
    tensors = [x, *inputs]
    # Concatenated in the layout of the kernels, time-major.
    rows = [y.transpose(0, 1) for y in tensors[:sequences]]
    joined = (rows[0].contiguous() if sequences == 1 else torch.cat(rows, -1)).transpose(0, 1)
    per_channel = tensors[sequences : sequences + parameters]
    joined_parameters = torch.cat(per_channel) if per_channel else joined.new_empty(0)
    initial = [y.to(dtype) for y in tensors[sequences + parameters :]]
    h0 = concatenated_states(initial) if initial else None
    options = *order._replace(resets=resets), backend, training
    weight = weights[0].to(dtype).view_as(weights[0])  # for the backward also if weight.data = ... changes
    return weighted_recurrence(trace, weight, joined, joined_parameters, h0, *options)[:-1]


def _repeated_calls(
    run: functools.partial, weight_hh: Tensor, x: Tensor, inputs: list[Tensor], order: Order
) -> RepeatedCalls | None:
    """The calls of the same sizes and settings as this one; None if CUDA graphs cannot replay them, or gain nothing."""
    batch, length, _ = x.shape
    if torch.compiler.is_compiling() or length > MOST_STEPS or x.numel() == 0:
        return None
    if not worth_capturing([weight_hh], batch * length):
        return None
    if order.cu_seqlens is not None or is_captured(x.device):  # the key does not include the sequences' lengths
        return None
    tensors = [x, weight_hh, *inputs] if order.resets is None else [x, weight_hh, *inputs, order.resets]
    settings = *run.args, order.resets is None, layers_allow_tf32(x.device, x.dtype), *product_switches()
    if (calls := _CALLS.find(tensors, *settings)) is None:
        _CALLS.add(lambda: RepeatedCalls(run, draws=False), tensors, *settings)
        calls = _CALLS.find(tensors, *settings)
    return calls
