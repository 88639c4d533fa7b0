"""The layouts in memory that the inputs of kernels may have."""

import torch


def strided(x, layout):
    """The same (B, T, D) values, otherwise in memory."""
    if layout == "time-major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "time-contiguous":
        return x.mT.contiguous().mT
    if layout == "channels apart":
        return x.repeat_interleave(2, 2)[..., ::2]
    if layout == "part of a row":
        return torch.cat((x, x), 2)[..., x.shape[2] :]
    return x
