"""What several contestants need: imports of packages, layouts, a loop over time, CUDA graphs."""

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ostinato.bench.workloads import Run, Unavailable, name_of
from ostinato.cuda_graphs.capture import capture

NOT_INSTALLED = " is not installed"  # why a peer is unavailable, after its package's name
Build = Callable[[Any, tuple[Tensor, ...]], Run]


def import_peer(module: str, package: str) -> Any:
    """Import a module of a peer's package; raises Unavailable if that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{package}{NOT_INSTALLED} ({error})") from error


def flashrnn_function(
    work: Any, device: torch.device, function: str, units: int, heads: int = 1, backend: str = "cuda_fused"
) -> Callable:
    """FlashRNN's function of a batch of the workload, for `heads` of `units` each; raises Unavailable without it."""
    functions = import_peer("flashrnn.flashrnn.flashrnn", "flashrnn")
    properties: Any = torch.cuda.get_device_properties(device)
    functions.get_gpu_info = lambda device_id: {  # its own does not compile with CUDA 13
        "maxThreadsPerBlock": 1024,
        "regsPerMultiprocessor": properties.regs_per_multiprocessor,
        "multiProcessorCount": properties.multi_processor_count,
        "sharedMemPerBlockOptin": properties.shared_memory_per_block_optin,
    }
    config = functions.FlashRNNConfig(
        backend=backend,
        function=function,
        head_dim=units,
        num_heads=heads,
        batch_size=work.batch,
        dtype=name_of(work.dtype),
        input_shape="TBGHD",
        output_shape="STBHD",
    )
    return partial(functions.flashrnn, config=config)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of the tensors that are leaves of autograd's graph and require gradients."""
    return tuple(x.detach().requires_grad_() for x in tensors)


def compile_anew(function: Callable) -> Callable:
    """Compile a function after a reset, as beyond a few shapes the compiler would silently fall back to eager mode."""
    torch.compiler.reset()
    torch._functorch.config.donated_buffer = False  # the backward pass is timed many times over one graph
    return torch.compile(function)


def time_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def time_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def over_time(
    step: Callable[[Any, Any], tuple[Tensor, Any]], inputs: Iterable[Any], state: Any, dim: int = 0
) -> Tensor:
    """Stack the outputs of a loop of ``output, state = step(input, state)``."""
    outputs = []
    for x in inputs:
        output, state = step(x, state)
        outputs.append(output)
    return torch.stack(outputs, dim)


def linear_loop(a: Tensor, b: Tensor, h: Tensor, dim: int) -> Tensor:
    """All states ``h = a * h + b`` from the initial one, by one PyTorch operation per step along `dim`."""
    states = []
    for a_t, b_t in zip(a.unbind(dim), b.unbind(dim), strict=True):
        h = torch.addcmul(b_t, a_t, h)
        states.append(h)
    return torch.stack(states, dim)


def need_cuda(x: Tensor) -> None:
    if x.device.type != "cuda":
        raise Unavailable("needs a CUDA device")


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """Capture the function in a CUDA graph, whose replays all write to the same tensors."""
    replay, result = capture(function)

    def replayed() -> Any:
        replay()
        return result

    return replayed
