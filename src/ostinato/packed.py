"""Where the steps of a PackedSequence begin, on the device of its rows."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.derived import derived_from


def offsets_of(batch_sizes: Tensor, device: torch.device) -> Tensor:
    """The first row of each step of a PackedSequence, then the number of rows: (T + 1,), int32."""
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return constant_offsets(batch_sizes, device)

    def compute() -> Tensor:  # without waiting for the GPU: the driver has read the host's memory when the copy returns
        return F.pad(batch_sizes.cumsum(0, dtype=torch.int32), (1, 0)).to(device, non_blocking=True)

    if torch.compiler.is_compiling():
        return compute()
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else None  # another may run ahead of the copy
    offsets: Tensor = derived_from(batch_sizes, ("offsets", device, stream), compute, by_value=True)
    return offsets


def constant_offsets(batch_sizes: Tensor, device: torch.device) -> Tensor:
    """As :func:`offsets_of`, from constants: a CUDA graph can capture these, unlike a copy from the host's memory."""
    parts, first = [], 0
    for batch, steps in zip(
        *(x.tolist() for x in torch.unique_consecutive(batch_sizes, return_counts=True)), strict=True
    ):
        parts.append(torch.arange(first, first + batch * steps, batch, dtype=torch.int32, device=device))
        first += batch * steps
    return torch.cat([*parts, torch.full((1,), first, dtype=torch.int32, device=device)])
