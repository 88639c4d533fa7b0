"""The loss of a language model on a text that it was not trained on."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.models import LanguageModel, evaluating
from ostinato.processes import Share
from ostinato.text import streams

MOST_STREAMS = 16  # read in parallel
SHORTEST_STREAM = 256  # tokens: the first ones of a stream are read from a zero state


@torch.no_grad()
def held_out(model: LanguageModel, tokens: Tensor, tokens_at_once: int = 1 << 14, share: Share | None = None) -> float:
    """Mean loss of ``model`` over a text, ``tokens`` (N,), in nats per token, without dropout.

    The text is read as up to 16 parallel streams, each from end to end with its state carried along, and
    sharded over processes by ``share``.  Raises ValueError if there are fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"tokens must be at least two; got {len(tokens)}")
    share = share or Share()
    rows = min(MOST_STREAMS, max(len(tokens) // SHORTEST_STREAM, 1))
    inputs, targets = streams(tokens, rows)
    counted, steps = targets.numel(), max(tokens_at_once // rows, 1)
    mine = share.rows(rows)
    # A process without rows reads one with weight 0, as gathering sharded weights is a collective.
    weight = 1.0 if mine.start < mine.stop else 0.0
    inputs, targets = (x[mine] if weight else x[:1] for x in (inputs, targets))
    loss_sum, state = torch.zeros((), dtype=torch.float64, device="cpu"), None
    with evaluating(model):
        for begin in range(0, inputs.size(1), steps):
            chunk = inputs[:, begin : begin + steps]
            own_steps = share.steps(chunk.size(1))
            logits, state = model(chunk[:, own_steps], state)
            own_targets = targets[:, begin : begin + steps][:, own_steps]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), own_targets.flatten(), reduction="sum")
            loss_sum += weight * loss.cpu()
    return share.total(loss_sum).item() / counted
