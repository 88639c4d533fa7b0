"""Contestants of a scan."""

from functools import partial

import torch
from torch import Tensor

import ostinato
from ostinato.bench.peers.prepare import (
    Build,
    compile_anew,
    import_peer,
    leaves,
    linear_loop,
    need_cuda,
    time_first,
    time_last,
)
from ostinato.bench.workloads import OURS, Run, Scan, Unavailable


def ours(work: Scan, data: tuple[Tensor, ...]) -> Run:
    (a, b), resets, cu_seqlens = leaves(*data[:2]), work.resets_of(data), work.cu_seqlens(data[0].device)
    return Run(lambda: ostinato.linear_scan(a, b, cu_seqlens=cu_seqlens, resets=resets)[0], (a, b))


def accelerated_scan(variant: str, work: Scan, data: tuple[Tensor, ...]) -> Run:
    """accelerated-scan: (B, C, T), contiguous."""
    need_cuda(data[0])
    if variant == "warp" and (work.length & (work.length - 1) or not 32 <= work.length <= 65536):
        raise Unavailable("T must be a power of two from 32 to 65,536")
    if work.dtype is torch.bfloat16:  # the error would corrupt the CUDA context
        raise Unavailable("left out in bfloat16, where a run with it ended in an illegal memory access")
    scan = import_peer(f"accelerated_scan.{variant}", "accelerated-scan").scan
    a, b = leaves(*(time_last(x).contiguous() for x in data))
    return Run(lambda: scan(a, b), (a, b), time_last)


def compiled_associative_scan(work: Scan, data: tuple[Tensor, ...]) -> Run:
    """PyTorch's own ``associative_scan``, compiled, along the last dimension."""
    if data[0].device.type != "cuda":
        raise Unavailable("compiles for CUDA only")
    associative_scan = import_peer("torch._higher_order_ops.associative_scan", "torch's prototype").associative_scan

    def compose(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    scan = compile_anew(lambda a, b: associative_scan(compose, (a, b), dim=2, combine_mode="pointwise")[1])
    a, b = leaves(*(time_last(x).contiguous() for x in data))
    wrong = "its backward pass is left out: it is off by more than a tenth, and takes a minute to compile"
    return Run(lambda: scan(a, b), (a, b), time_last, forward_only=wrong)


def time_loop(work: Scan, data: tuple[Tensor, ...]) -> Run:
    """One PyTorch operation per time step."""
    if work.length > 4096:
        raise Unavailable("left out above T = 4,096")
    a, b = leaves(*(time_first(x).contiguous() for x in data))
    return Run(lambda: linear_loop(a, b, torch.zeros_like(a[0]), 0), (a, b), time_first)


CONTESTANTS: dict[str, dict[str, Build]] = {
    "scan": {
        OURS: ours,
        "accelerated-scan warp": partial(accelerated_scan, "warp"),
        "accelerated-scan Triton": partial(accelerated_scan, "scalar"),
        "torch associative_scan": compiled_associative_scan,
        "PyTorch time loop": time_loop,
    },
}
