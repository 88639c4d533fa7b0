"""RNN, GRU and LSTM as loops over time, in exported programs where no kernel applies.

That is with projections, or with resets where autocast converts from other dtypes than float32.  PyTorch's own layers
would be exported with the number of steps of the example, and do not support resets.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ostinato.episodes import in_reverse_of_rows
from ostinato.kernels.operators.export import refuse_packed
from ostinato.kernels.persistent.plain import looped, owned
from ostinato.recurrent.rows import batch_and_steps, from_rows, to_rows
from ostinato.recurrent.torch_layers import state_sizes
from ostinato.recurrent.weights import MaskedLayers
from ostinato.states import hidden_of


def forward_exported(
    layer: MaskedLayers, input: Any, states: list[Tensor], weights: list[Tensor], resets: Tensor | None
) -> tuple[Any, Any]:
    """``torch.nn``'s forward of a sequence or a batch, as a loop over the steps for each layer and direction."""
    if isinstance(input, PackedSequence):
        refuse_packed()
    batch, steps = cast(tuple[int, int], batch_and_steps(input, states, layer.batch_first))
    rows, states, resets = to_rows(input, states, resets, layer.batch_first)
    sizes = state_sizes(layer)[: 2 if layer.mode == "LSTM" else 1]
    if not states:
        states = [rows.new_zeros(len(layer._all_weights), batch, n) for n in sizes]
    batched = input if input.dim() == 3 else input.unsqueeze(0 if layer.batch_first else 1)
    layer.check_forward_args(batched, hidden_of(states), None)
    per_layer, directions = len(layer._all_weights[0]), 2 if layer.bidirectional else 1
    resets_of_directions = [resets, None if resets is None else in_reverse_of_rows(resets, None, batch)]
    last: list[list[Tensor]] = []
    x = owned(rows).view(steps, batch, layer.input_size)
    for first in range(0, len(layer._all_weights), directions):
        if first and layer.training:
            x = F.dropout(x, layer.dropout)
        outputs = []
        for i in range(first, first + directions):
            weight_ih, weight_hh, *rest = weights[i * per_layer : (i + 1) * per_layer]
            bias_ih, bias_hh = rest[:2] if layer.bias else (None, None)
            projected, initial = F.linear(x, weight_ih, bias_ih), [state[i] for state in states]
            recurrent = weight_hh, bias_hh, resets_of_directions[i - first]
            weight_hr = rest[-1] if layer.proj_size else None
            options: dict[str, Any] = {"reverse": i > first, "weight_hr": weight_hr}
            output, *final = looped(layer.mode.lower(), projected, initial, *recurrent, **options)
            outputs.append(output)
            last.append(final)
        x = torch.cat(outputs, 2)
    states = [torch.stack(parts) for parts in zip(*last, strict=True)]
    return from_rows(input, owned(x.flatten(0, 1)), states, layer.batch_first)
