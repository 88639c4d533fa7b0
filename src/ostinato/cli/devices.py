"""The device a command runs on."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch


Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Precision = Annotated[str, typer.Option(help="float32, bfloat16 (autocast), or auto: bfloat16 on a GPU that has it.")]

RELEASE_SECONDS = 0.2  # in which gloo's threads release the tensors of the last collectives


def choose_device(name: str) -> "torch.device":
    """Return the device called ``name``; "auto" is the accelerator if there is one, else the CPU.

    Raises ValueError if PyTorch cannot use it here.
    """
    import torch

    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.empty(0, device=name).device
        if device.type != "meta":
            return device
        reason = "it holds no numbers"
    except NotImplementedError:  # its message lists all of torch's backends
        reason = "this PyTorch was built without it"
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
    raise ValueError(f"device must be auto, or one that PyTorch can use here; got {name!r} ({reason})")


@contextmanager
def joined_job(name: str) -> "Iterator[torch.device]":
    """Yield this process's device; under torchrun, each process has its own.

    Within the block, torchrun's processes share a default process group: NCCL between GPUs, gloo between CPUs.

    Raises ValueError if PyTorch cannot use the device here, or there are fewer devices than processes.
    """
    device = choose_device(name)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    import torch
    from torch import distributed

    backend = "gloo"
    if device.type != "cpu":
        module, number = torch.get_device_module(device), int(os.environ["LOCAL_RANK"])
        if name not in ("auto", device.type):
            raise ValueError(f"device must be auto, cpu or {device.type} under torchrun; got {name!r}")
        if number >= module.device_count():
            raise ValueError(
                f"nproc-per-node must be at most the number of devices here, {module.device_count()}; this is process "
                f"{number + 1}"
            )
        device = torch.device(device.type, number)
        module.set_device(device)
        backend = f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"
    distributed.init_process_group(backend)
    try:
        yield device
    except typer.Exit:
        _leave_job()
        raise
    # Not after any other error: the other processes may be gone, and leaving would wait for them.
    _leave_job()


def _leave_job() -> None:
    """Destroy the process group, and give gloo's threads time to release the tensors of the last collectives.

    They need the interpreter for that and cannot be joined; if it is shutting down by then, they abort the process.
    """
    from torch import distributed

    distributed.destroy_process_group()
    time.sleep(RELEASE_SECONDS)
