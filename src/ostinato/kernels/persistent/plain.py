"""One recurrent layer and direction in operators for exported graphs: PyTorch's ``scan``, or ONNX's own."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.export import loop, refuse_packed
from ostinato.kernels.persistent.plan import GATES
from ostinato.kernels.persistent.reference import advance

# ONNX's operator of a cell, and its gates as indices into torch.nn's order.
_ONNX: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "rnn_tanh": ("RNN", (0,), {"activations": ["Tanh"]}),
    "rnn_relu": ("RNN", (0,), {"activations": ["Relu"]}),
    "gru": ("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "lstm": ("LSTM", (0, 3, 1, 2), {}),
}


def recurrent_layer(
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    mask_hh: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    training: bool,
    path: str | None,
    directions: int,
) -> tuple[Tensor, ...]:
    """The operator of that name, without a backward."""
    if offsets is not None:
        refuse_packed()
    steps = x.shape[0] // batch
    layer = _owned(x).view(steps, batch, x.shape[1]), h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, cell, reverse
    if torch.onnx.is_in_onnx_export() and resets is None:  # ONNX's operators do not support resets
        output, h_n, *c_n = _in_onnx(*layer)
    else:
        output, h_n, *c_n = _looped(*layer, None if resets is None else resets.view(steps, batch, 1))
    empty = x.new_empty(0)
    return _owned(output.flatten(0, 1)), h_n, *(c_n or [empty]), empty, empty


def _owned(x: Tensor) -> Tensor:
    """A contiguous copy: from a view's strides ``torch.export`` would infer bounds on dynamic sizes."""
    return x.clone(memory_format=torch.contiguous_format)


def _looped(
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    cell: str,
    reverse: bool,
    resets: Tensor | None,
) -> tuple[Tensor, ...]:
    """From x (T, B, in): the output (T, B, H), h_n and an LSTM's c_n (B, H), as ``reference.forward`` computes them.

    ``resets`` are (T, B, 1).
    """
    dtype, hidden = x.dtype, weight_hh.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    weight = weight_hh.to(wide).T.contiguous()
    bias = weight.new_zeros(GATES[cell] * hidden) if bias_hh is None else bias_hh.to(wide)
    given = [h0, c0] if cell == "lstm" else [h0]
    states = [weight.new_zeros(x.shape[1], hidden) if state is None else state.to(wide) for state in given]

    def step(before: list[Tensor], inputs: list[Tensor], constants: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        p, *reset = inputs
        weight, bias = constants
        if reset:
            before = [state.masked_fill(reset[0], 0.0) for state in before]
        h, *c = advance(p.to(wide), torch.addmm(bias, before[0], weight), before[0], before[-1], cell)
        output = h.to(dtype)
        return [output.to(wide), *c], output

    inputs = [F.linear(x, weight_ih, bias_ih), *([] if resets is None else [resets])]
    if reverse:
        inputs = [y.flip(0) for y in inputs]
    last, output = loop(step, states, inputs, [weight, bias])
    return output.flip(0) if reverse else output, *(state.to(dtype) for state in last)


def _in_onnx(
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    cell: str,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """As :func:`_looped`, without resets."""
    operator, order, attributes = _ONNX[cell]
    steps, batch, _ = x.shape
    hidden = weight_hh.shape[1]

    def ordered(weight: Tensor) -> Tensor:
        return torch.cat([weight[gate * hidden : (gate + 1) * hidden] for gate in order])

    bias = None
    if bias_ih is not None and bias_hh is not None:
        bias = torch.cat([ordered(bias_ih), ordered(bias_hh)])[None]
    given = [h0, c0] if cell == "lstm" else [h0]
    states = [None if state is None else state[None] for state in given]
    output, *last = torch.onnx.ops.symbolic_multi_out(
        operator,
        [x, ordered(weight_ih)[None], ordered(weight_hh)[None], bias, None, *states],
        {"hidden_size": hidden, "direction": "reverse" if reverse else "forward", **attributes},
        dtypes=[x.dtype] * (1 + len(given)),
        shapes=[(steps, 1, batch, hidden), *[(1, batch, hidden)] * len(given)],
    )
    return output[:, 0], *(state[0] for state in last)
