"""The scans as loops over time in the fewest lines; in float64, they define what every fast path must compute."""

import torch
from torch import Tensor


def linear_scan(
    a: Tensor, b: Tensor, h0: Tensor, reverse: bool = False, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``h[t] = a[t] * h[t-1] + b[t]``, one step at a time; a, b: (B, T, D), h0: (B, D).

    Where ``resets``, (B, T), is true, the state is zero before the step.
    """
    h, steps = h0, [h0] * a.shape[1]
    a_t, b_t = a.unbind(1), b.unbind(1)  # the gradient of a[:, t] would have the size of a, at every step
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        h = h if resets is None else h.masked_fill(resets[:, t, None], 0.0)
        h = a_t[t] * h + b_t[t]
        steps[t] = h
    return torch.stack(steps, 1) if steps else b, h


def log_linear_scan(
    log_a: Tensor, log_b: Tensor, log_h0: Tensor, reverse: bool = False, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`linear_scan` in log space: ``log_h[t] = logaddexp(log_a[t] + log_h[t-1], log_b[t])``."""
    h, steps = log_h0, [log_h0] * log_a.shape[1]
    a_t, b_t = log_a.unbind(1), log_b.unbind(1)
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        h = h if resets is None else h.masked_fill(resets[:, t, None], float("-inf"))
        h = torch.logaddexp(a_t[t] + h, b_t[t])
        steps[t] = h
    return torch.stack(steps, 1) if steps else log_b, h
