"""One recurrent layer and direction in operators for exported graphs: PyTorch's ``scan``, or ONNX's own."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.operators.export import loop, refuse_packed
from ostinato.kernels.persistent.arguments import Arguments
from ostinato.kernels.persistent.reference import advance

# ONNX's operator of a cell, and its gates as indices into torch.nn's order.
_ONNX: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "rnn_tanh": ("RNN", (0,), {"activations": ["Tanh"]}),
    "rnn_relu": ("RNN", (0,), {"activations": ["Relu"]}),
    "gru": ("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "lstm": ("LSTM", (0, 3, 1, 2), {}),
}


def recurrent_layer(*args: Any) -> tuple[Tensor, ...]:
    """The operator of that name, without a backward."""
    given = Arguments(*args)
    if given.offsets is not None:
        refuse_packed()
    steps, empty = given.x.shape[0] // given.batch, given.x.new_empty(0)
    x = owned(given.x).view(steps, given.batch, given.x.shape[1])
    # ONNX's operators do not support resets, nor bfloat16, and ONNX Runtime's no float64.
    has_operator = given.resets is None and x.dtype in (torch.float32, torch.float16)
    run = _in_onnx if torch.onnx.is_in_onnx_export() and has_operator else _looped
    output, h_n, *c_n = run(given, x)
    return owned(output.flatten(0, 1)), h_n, *(c_n or [empty]), empty, empty


def owned(x: Tensor) -> Tensor:
    """A contiguous copy: from a view's strides ``torch.export`` would infer bounds on dynamic sizes."""
    return x.clone(memory_format=torch.contiguous_format)


def _looped(given: Arguments, x: Tensor) -> tuple[Tensor, ...]:
    """From x (T, B, in): the output (T, B, H), h_n and an LSTM's c_n (B, H), as ``reference.forward`` computes them."""
    cell, weight_hh, bias_hh, _, h0, c0, sequences, _ = given.layer
    initial = [h0, c0] if cell == "lstm" else [h0]
    zero = x.new_zeros(x.shape[1], weight_hh.shape[1])
    states = [zero if state is None else state for state in initial]
    p = F.linear(x, given.weight_ih, given.bias_ih)
    return looped(cell, p, states, weight_hh, bias_hh, sequences.resets, reverse=sequences.reverse)


def looped(
    cell: str,
    p: Tensor,
    states: list[Tensor],
    weight_hh: Tensor,
    bias_hh: Tensor | None,
    resets: Tensor | None,
    *,
    reverse: bool,
    weight_hr: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """A layer and direction as one ``scan``, computed in float32 at least.

    Args:
        p: (T, B, gates * H), the product with the input.
        states: h and an LSTM's c before the first step, (B, H), which h is not with ``weight_hr``.
        resets: (T * B,), of rows; in reverse, of :func:`~ostinato.episodes.in_reverse_of_rows`.
        weight_hr: an LSTM's projection of h, (proj_size, H).

    Returns:
        The output (T, B, H or proj_size), and the states after the last step.
    """
    dtypes = [state.dtype for state in states]
    wide = torch.promote_types(p.dtype, torch.float32)
    weight = weight_hh.to(wide).T.contiguous()
    bias = weight.new_zeros(weight.shape[1]) if bias_hh is None else bias_hh.to(wide)
    projection = [] if weight_hr is None else [weight_hr.to(wide).T.contiguous()]

    def step(before: list[Tensor], inputs: list[Tensor], constants: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        p, *reset = inputs
        weight, bias, *projection = constants
        if reset:
            before = [state.masked_fill(reset[0], 0.0) for state in before]
        h, *c = advance(p.to(wide), torch.addmm(bias, before[0], weight), before[0], before[-1], cell)
        for weight_hr in projection:
            h = h @ weight_hr
        output = h.to(dtypes[0])
        return [output.to(wide), *c], output

    inputs = [p]
    if resets is not None:
        inputs.append(resets.view(*p.shape[:2], 1))
    last, output = loop(step, [x.to(wide) for x in states], inputs, [weight, bias, *projection], reverse=reverse)
    return output, *(state.to(dtype) for state, dtype in zip(last, dtypes, strict=True))


def _in_onnx(given: Arguments, x: Tensor) -> tuple[Tensor, ...]:
    """As :func:`_looped`, without resets."""
    cell, weight_hh, bias_hh, _, h0, c0, sequences, _ = given.layer
    operator, order, attributes = _ONNX[cell]
    steps, batch, _ = x.shape
    hidden = weight_hh.shape[1]

    def ordered(weight: Tensor) -> Tensor:
        return torch.cat([weight[gate * hidden : (gate + 1) * hidden] for gate in order])

    bias = None
    if given.bias_ih is not None and bias_hh is not None:
        bias = torch.cat([ordered(given.bias_ih), ordered(bias_hh)])[None]
    states = [None if state is None else state[None] for state in ([h0, c0] if cell == "lstm" else [h0])]
    output, *last = torch.onnx.ops.symbolic_multi_out(
        operator,
        [x, ordered(given.weight_ih)[None], ordered(weight_hh)[None], bias, None, *states],
        {"hidden_size": hidden, "direction": "reverse" if sequences.reverse else "forward", **attributes},
        dtypes=[x.dtype] * (1 + len(states)),
        shapes=[(steps, 1, batch, hidden), *[(1, batch, hidden)] * len(states)],
    )
    return output[:, 0], *(state[0] for state in last)
