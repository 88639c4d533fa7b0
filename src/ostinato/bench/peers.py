"""Who computes it: one function a contestant, which makes it ready for a workload at its own best setting.

Each gets its own layout, contiguous, with no transposes charged to it.  One that cannot run here raises
:class:`Unavailable` with the reason; one that fails is reported and does not stop the rest.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ostinato
from ostinato.bench.workloads import Layer, Run, Scan, Workload


class Unavailable(Exception):
    """Why a peer cannot run on this machine, or not this workload."""


Build = Callable[[Any, tuple[Tensor, ...]], Run]

OURS = "Ostinato"


def contestants(work: Workload) -> dict[str, Build]:
    """Ostinato first, then its peers for this kind of workload."""
    if isinstance(work, Scan):
        return SCANS
    return LAYERS[work.cell] if work.against_peers else {OURS: ostinato_layer}


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{package} is not installed ({error})") from error


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in tensors)


def _time_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _time_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


# Scans


def ostinato_scan(_work: Scan, data: tuple[Tensor, ...]) -> Run:
    a, b = _leaves(*data)
    return Run(lambda: ostinato.linear_scan(a, b)[0], (a, b))


def accelerated_scan(variant: str, work: Scan, data: tuple[Tensor, ...]) -> Run:
    """accelerated-scan: (B, C, T), contiguous."""
    if data[0].device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    if variant == "warp" and (work.length & (work.length - 1) or not 32 <= work.length <= 65536):
        raise Unavailable("T must be a power of two from 32 to 65,536")
    if work.dtype is torch.bfloat16:  # it would take the run down with it: a CUDA context does not survive that
        raise Unavailable("left out in bfloat16, where a run with it ended in an illegal memory access")
    scan = _import(f"accelerated_scan.{variant}", "accelerated-scan").scan
    a, b = _leaves(*(_time_last(x).contiguous() for x in data))
    return Run(lambda: scan(a, b), (a, b), _time_last)


def compiled_associative_scan(_work: Scan, data: tuple[Tensor, ...]) -> Run:
    """PyTorch's own ``associative_scan``, compiled, along the last dimension."""
    if data[0].device.type != "cuda":
        raise Unavailable("compiles for CUDA only")
    associative_scan = _import("torch._higher_order_ops.associative_scan", "torch's prototype").associative_scan

    def compose(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the backward pass is timed many times over one graph
    scan = torch.compile(lambda a, b: associative_scan(compose, (a, b), dim=2, combine_mode="pointwise")[1])
    a, b = _leaves(*(_time_last(x).contiguous() for x in data))
    return Run(lambda: scan(a, b), (a, b), _time_last)


def time_loop(work: Scan, data: tuple[Tensor, ...]) -> Run:
    """One PyTorch operation a time step."""
    if work.length > 4096:
        raise Unavailable("left out above T = 4,096")
    a, b = _leaves(*(_time_first(x).contiguous() for x in data))

    def loop() -> Tensor:
        h, states = torch.zeros_like(a[0]), []
        for a_t, b_t in zip(a.unbind(0), b.unbind(0), strict=True):
            h = torch.addcmul(b_t, a_t, h)
            states.append(h)
        return torch.stack(states)

    return Run(loop, (a, b), _time_first)


SCANS: dict[str, Build] = {
    OURS: ostinato_scan,
    "accelerated-scan warp": partial(accelerated_scan, "warp"),
    "accelerated-scan Triton": partial(accelerated_scan, "scalar"),
    "torch associative_scan": compiled_associative_scan,
    "PyTorch time loop": time_loop,
}


# Layers


def ostinato_layer(work: Layer, data: tuple[Tensor, ...]) -> Run:
    layer_type = {"mingru": ostinato.MinGRU, "minlstm": ostinato.MinLSTM}[work.cell]
    x, weight, bias = _leaves(*data)
    module = layer_type(work.input_size, work.channels, batch_first=True, device=x.device, dtype=work.dtype)
    with torch.no_grad():
        module.get_parameter("weight_ih_l0").copy_(weight)
        module.get_parameter("bias_ih_l0").copy_(bias)
    return Run(lambda: module(x)[0], (x, *module.parameters()), has_bias=True)


def min_rnn_pytorch(compiled: bool, work: Layer, data: tuple[Tensor, ...]) -> Run:
    """minGRU-pytorch, whose layers have no bias and compute in log space."""
    name = {"mingru": "minGRU", "minlstm": "minLSTM"}[work.cell]
    layer_type = getattr(_import(f"minGRU_pytorch.{name}", "minGRU-pytorch"), name)
    (x,) = _leaves(data[0])
    module = layer_type(work.input_size, expansion_factor=work.channels / work.input_size, proj_out=False)
    module = module.to(x.device, work.dtype)
    *gates, candidate = data[1].chunk(3 if work.cell == "minlstm" else 2)
    (weight,) = module.parameters()
    with torch.no_grad():
        weight.copy_(torch.cat((candidate, *gates)))
    if compiled:
        torch._dynamo.reset()  # beyond a few shapes the compiler would silently fall back to eager mode
        module = torch.compile(module)
    return Run(lambda: module(x), (x, weight))


def torch_recurrent(layer_type: type[nn.GRU] | type[nn.LSTM], work: Layer, data: tuple[Tensor, ...]) -> Run:
    """PyTorch's recurrent layer of the same size, time first as cuDNN wants it: another function, the usual choice."""
    (x,) = _leaves(_time_first(data[0]).contiguous())
    module = layer_type(work.input_size, work.channels, device=x.device, dtype=work.dtype)
    return Run(lambda: module(x)[0], (x, *module.parameters()), _time_first, same_function=False)


LAYERS: dict[str, dict[str, Build]] = {
    "mingru": {
        OURS: ostinato_layer,
        "minGRU-pytorch": partial(min_rnn_pytorch, False),
        "minGRU-pytorch, compiled": partial(min_rnn_pytorch, True),
        "torch.nn.GRU": partial(torch_recurrent, nn.GRU),
    },
    "minlstm": {
        OURS: ostinato_layer,
        "minLSTM-pytorch": partial(min_rnn_pytorch, False),
        "minLSTM-pytorch, compiled": partial(min_rnn_pytorch, True),
        "torch.nn.LSTM": partial(torch_recurrent, nn.LSTM),
    },
}
