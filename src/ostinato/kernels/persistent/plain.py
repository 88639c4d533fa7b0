"""One recurrent layer and direction in operators for exported graphs: PyTorch's ``scan``, or ONNX's own."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.operators.export import loop, refuse_packed
from ostinato.kernels.persistent.arguments import Arguments
from ostinato.kernels.persistent.reference import advance

# For each cell, ONNX's operator, its gates as indices into torch.nn's order, and its attributes.
_ONNX: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "rnn_tanh": ("RNN", (0,), {"activations": ["Tanh"]}),
    "rnn_relu": ("RNN", (0,), {"activations": ["Relu"]}),
    "gru": ("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "lstm": ("LSTM", (0, 3, 1, 2), {}),
}


def recurrent_layer(*args: Any) -> tuple[Tensor, ...]:
    """The operator ``recurrent_layer`` in PyTorch's or ONNX's operators, without a backward pass."""
    arguments = Arguments(*args)
    if arguments.offsets is not None:
        refuse_packed()
    steps, empty = arguments.x.shape[0] // arguments.batch, arguments.x.new_empty(0)
    x = owned(arguments.x).view(steps, arguments.batch, arguments.x.shape[1])
    # ONNX's operators support neither resets nor bfloat16, those of ONNX Runtime no float64.
    has_operator = arguments.resets is None and x.dtype in (torch.float32, torch.float16)
    run = _in_onnx if torch.onnx.is_in_onnx_export() and has_operator else _looped
    output, h_n, *c_n = run(arguments, x)
    return owned(output.flatten(0, 1)), h_n, *(c_n or [empty]), empty, empty


def owned(x: Tensor) -> Tensor:
    """A contiguous copy: ``torch.export`` would infer bounds on dynamic sizes from a view's strides."""
    return x.clone(memory_format=torch.contiguous_format)


def _looped(arguments: Arguments, x: Tensor) -> tuple[Tensor, ...]:
    """The output, (T, B, H), h_n and an LSTM's c_n, (B, H), from x, (T, B, in), as ``reference.forward`` has them."""
    cell, weight_hh, bias_hh, _, h0, c0, sequences, _ = arguments.layer
    initial = [h0, c0] if cell == "lstm" else [h0]
    zero = x.new_zeros(x.shape[1], weight_hh.shape[1])
    states = [zero if state is None else state for state in initial]
    p = F.linear(x, arguments.weight_ih, arguments.bias_ih)
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
    """A layer and direction as one ``scan``, computed in at least float32.

    Args:
        p: (T, B, gates * H), the product with the input.
        states: the initial h and an LSTM's initial c, (B, H) each; with ``weight_hr``, h is (B, proj_size).
        resets: (T * B,), of rows; in reverse, those of :func:`~ostinato.episodes.in_reverse_of_rows`.
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


def _in_onnx(arguments: Arguments, x: Tensor) -> tuple[Tensor, ...]:
    """The same as :func:`_looped`, without resets, by ONNX's operator of the cell."""
    cell, weight_hh, bias_hh, _, h0, c0, sequences, _ = arguments.layer
    operator, order, attributes = _ONNX[cell]
    steps, batch, _ = x.shape
    hidden = weight_hh.shape[1]

    def ordered(weight: Tensor) -> Tensor:
        return torch.cat([weight[gate * hidden : (gate + 1) * hidden] for gate in order])

    bias = None
    if arguments.bias_ih is not None and bias_hh is not None:
        bias = torch.cat([ordered(arguments.bias_ih), ordered(bias_hh)])[None]
    states = [None if state is None else state[None] for state in ([h0, c0] if cell == "lstm" else [h0])]
    output, *last = torch.onnx.ops.symbolic_multi_out(
        operator,
        [x, ordered(arguments.weight_ih)[None], ordered(weight_hh)[None], bias, None, *states],
        {"hidden_size": hidden, "direction": "reverse" if sequences.reverse else "forward", **attributes},
        dtypes=[x.dtype] * (1 + len(states)),
        shapes=[(steps, 1, batch, hidden), *[(1, batch, hidden)] * len(states)],
    )
    return output[:, 0], *(state[0] for state in last)
