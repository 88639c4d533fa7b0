"""RNN, GRU and LSTM in exported programs where no kernel takes them: with projections, or autocast from other dtypes.

PyTorch's own layers become the example's number of steps there, and know no resets.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ostinato.episodes import in_reverse_of_rows
from ostinato.kernels.operators.export import refuse_packed
from ostinato.kernels.persistent.plain import looped, owned
from ostinato.recurrent.rows import as_given, in_rows, size_of
from ostinato.recurrent.torch_layers import state_sizes
from ostinato.recurrent.weights import MaskedLayers
from ostinato.states import hidden_of


def forward_exported(
    layer: MaskedLayers, input: Any, states: list[Tensor], weights: list[Tensor], resets: Tensor | None
) -> tuple[Any, Any]:
    """As ``torch.nn``'s forward of one or several sequences, a loop over the steps for each layer and direction."""
    if isinstance(input, PackedSequence):
        refuse_packed()
    batch, steps = cast(tuple[int, int], size_of(input, states, layer.batch_first))
    rows, states, resets = in_rows(input, states, resets, layer.batch_first)
    sizes = state_sizes(layer)[: 2 if layer.mode == "LSTM" else 1]
    if not states:
        states = [rows.new_zeros(len(layer._all_weights), batch, n) for n in sizes]
    batched = input if input.dim() == 3 else input.unsqueeze(0 if layer.batch_first else 1)
    layer.check_forward_args(batched, hidden_of(states), None)
    size, directions = len(layer._all_weights[0]), 2 if layer.bidirectional else 1
    begins = [resets, None if resets is None else in_reverse_of_rows(resets, None, batch)]
    last: list[list[Tensor]] = []
    x = owned(rows).view(steps, batch, layer.input_size)
    for first in range(0, len(layer._all_weights), directions):
        if first and layer.training:
            x = F.dropout(x, layer.dropout)
        outputs = []
        for i in range(first, first + directions):
            weight_ih, weight_hh, *others = weights[i * size : (i + 1) * size]
            bias_ih, bias_hh = others[:2] if layer.bias else (None, None)
            p, before = F.linear(x, weight_ih, bias_ih), [state[i] for state in states]
            recurrent = weight_hh, bias_hh, begins[i - first]
            weight_hr = others[-1] if layer.proj_size else None
            output, *after = looped(layer.mode.lower(), p, before, *recurrent, reverse=i > first, weight_hr=weight_hr)
            outputs.append(output)
            last.append(after)
        x = torch.cat(outputs, 2)
    states = [torch.stack(parts) for parts in zip(*last, strict=True)]
    return as_given(input, owned(x.flatten(0, 1)), states, layer.batch_first)
