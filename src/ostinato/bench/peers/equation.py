"""Contestants of a linear recurrence given by its equation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.bench.peers.prepare import (
    Build,
    compile_anew,
    import_peer,
    leaves,
    linear_loop,
    need_cuda,
    time_last,
)
from ostinato.bench.workloads import EQUATIONS, OURS, Equation, Run, Unavailable

UNROLLED = 256  # steps of a compiled loop


def ours(work: Equation, data: tuple[Tensor, ...]) -> Run:
    arguments, function = leaves(*data), EQUATIONS[work.cell]
    return Run(lambda: function(*arguments)[0], arguments)


def time_loop(work: Equation, data: tuple[Tensor, ...]) -> Run:
    """The coefficients of all steps at once, then one PyTorch operation per step."""
    arguments, function = leaves(*data), EQUATIONS[work.cell].function

    def loop() -> Tensor:
        a, b = function(*arguments)
        return linear_loop(a, b, torch.zeros_like(a[:, 0]), 1)

    return Run(loop, arguments)


def compiled_time_loop(work: Equation, data: tuple[Tensor, ...]) -> Run:
    """The same loop, compiled for UNROLLED steps per call: 256 was faster than 16 and 64."""
    *sequences, parameter = data
    function = EQUATIONS[work.cell].function

    def chunk(h: Tensor, *arguments: Tensor) -> Tensor:
        a, b = function(*arguments)
        return linear_loop(a, b, h, 1)

    compiled = compile_anew(chunk)

    def loop() -> Tensor:
        h, parts = torch.zeros_like(sequences[0][:, 0]), []
        for arguments in zip(*(x.split(UNROLLED, 1) for x in sequences), strict=True):
            parts.append(compiled(h, *arguments, parameter))
            h = parts[-1][:, -1]
        return torch.cat(parts, 1)

    slow = "left out, as it takes minutes to compile"
    return Run(loop, (*sequences, parameter), forward_only=f"its backward pass is {slow}")


def lrnnx(work: Equation, data: tuple[Tensor, ...]) -> Run:
    """lrnnx's kernel over (B, D, T); a compiled function computes the gated input, the decay and its exponent."""
    need_cuda(data[0])
    if work.dtype is not torch.float32:
        raise Unavailable("takes float32")
    scan = import_peer("lrnnx.ops.rglru_scan", "lrnnx").rglru_scan_fn
    *sequences, log_lambda = data
    arguments = leaves(*(time_last(x).contiguous() for x in sequences), log_lambda)

    def coefficients(x: Tensor, r: Tensor, i: Tensor, log_lambda: Tensor) -> tuple[Tensor, ...]:
        return torch.sigmoid(i) * x, 8 * torch.sigmoid(r), torch.exp(-F.softplus(log_lambda))[:, None]

    compiled = compile_anew(coefficients)
    return Run(lambda: scan(*compiled(*arguments)), arguments, time_last)


def fla_hgrn(_work: Equation, data: tuple[Tensor, ...]) -> Run:
    """flash-linear-attention's kernel; a compiled function computes its input and the logarithm of its gate."""
    need_cuda(data[0])
    chunk_hgrn = import_peer("fla.ops.hgrn", "flash-linear-attention").chunk_hgrn
    arguments = leaves(*data)

    def coefficients(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        a, b = EQUATIONS["HGRN"].function(*(x.float() for x in arguments))
        return b.to(data[0].dtype), a.log().to(data[0].dtype)

    compiled = compile_anew(coefficients)
    return Run(lambda: chunk_hgrn(*compiled(*arguments))[0], arguments)


LOOPS: dict[str, Build] = {"PyTorch loop": time_loop, "PyTorch loop, compiled": compiled_time_loop}
CONTESTANTS: dict[str, dict[str, Build]] = {
    "RG-LRU": {OURS: ours, "lrnnx, compiled": lrnnx, **LOOPS},
    "HGRN": {OURS: ours, "flash-linear-attention, compiled": fla_hgrn},
    "invented": {OURS: ours},
}
