"""What every fast path computes, said in the fewest lines.

The sequential recurrence in float64 is the definition of the scan; the others
here are the classical ways to make it parallel, written to be read.  Nothing
in the library calls them for speed.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_scan(
    a: Tensor, b: Tensor, h0: Tensor, reverse: bool = False, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``h[t] = a[t] * h[t-1] + b[t]``, one step at a time; a, b: (B, T, D), h0: (B, D).

    Where ``resets``, (B, T), is true, the state is zero before the step.
    """
    h, steps = h0, [h0] * a.shape[1]
    a_t, b_t = a.unbind(1), b.unbind(1)  # at once, or each step's gradient would be as large as all steps together
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        h = h if resets is None else h.masked_fill(resets[:, t, None], 0.0)
        h = a_t[t] * h + b_t[t]
        steps[t] = h
    return torch.stack(steps, 1) if steps else b, h


def log_linear_scan(
    log_a: Tensor, log_b: Tensor, log_h0: Tensor, reverse: bool = False, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``log_h[t] = logaddexp(log_a[t] + log_h[t-1], log_b[t])``, one step at a time."""
    h, steps = log_h0, [log_h0] * log_a.shape[1]
    a_t, b_t = log_a.unbind(1), log_b.unbind(1)
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        h = h if resets is None else h.masked_fill(resets[:, t, None], float("-inf"))
        h = torch.logaddexp(a_t[t] + h, b_t[t])
        steps[t] = h
    return torch.stack(steps, 1) if steps else log_b, h


def blelloch_scan(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """The work-efficient parallel scan (Blelloch 1990, section 1.3): 2 log2(T) passes, 2T compositions.

    The up-sweep composes pairs of steps into a tree, ``(A2, B2) o (A1, B1) = (A2*A1, A2*B1 + B2)``;
    the down-sweep hands every node the state before its first step, from the root to the leaves.
    """
    length = a.shape[1]
    levels = max(length - 1, 0).bit_length()
    pad = (0, 0, 0, (1 << levels) - length)
    tree = [(F.pad(a, pad, value=1.0), F.pad(b, pad))]
    for _ in range(levels):  # up-sweep
        (A, B) = tree[-1]
        tree.append((A[:, 1::2] * A[:, ::2], A[:, 1::2] * B[:, ::2] + B[:, 1::2]))
    before = h0[:, None]
    for A, B in reversed(tree[:-1]):  # down-sweep
        after_left = A[:, ::2] * before + B[:, ::2]
        before = torch.stack((before, after_left), 2).flatten(1, 2)
    return a * before[:, :length] + b


def log_space_scan(log_a: Tensor, log_b: Tensor, log_h0: Tensor) -> Tensor:
    """The paper's parallel scan (arXiv 2410.01201, appendix B): ``cumsum`` and ``logcumsumexp``.

    Its float32 error grows with T because both cumulative sums do.
    """
    log_decay = F.pad(log_a.cumsum(1), (0, 0, 1, 0))
    log_values = torch.cat((log_h0[:, None], log_b), 1)
    return (log_decay + (log_values - log_decay).logcumsumexp(1))[:, 1:]
