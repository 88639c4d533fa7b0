"""Memory layouts of the inputs of kernels."""

import torch


def strided(x, layout):
    """Return the same (B, T, D) values in another memory layout."""
    if layout == "time-major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "time-contiguous":
        return x.mT.contiguous().mT
    if layout == "channels apart":
        return x.repeat_interleave(2, 2)[..., ::2]
    if layout == "part of a row":
        return torch.cat((x, x), 2)[..., x.shape[2] :]
    return x
