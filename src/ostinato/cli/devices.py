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

LEAVING = 0.2  # seconds in which a job's threads let go of its tensors


def choose_device(name: str) -> "torch.device":
    """The device called ``name``; "auto" is the accelerator if there is one, the CPU otherwise.

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
    except NotImplementedError:  # torch lists all its backends
        reason = "this PyTorch was built without it"
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
    raise ValueError(f"device must be auto, or one that PyTorch can use here; got {name!r} ({reason})")


@contextmanager
def joined_job(name: str) -> "Iterator[torch.device]":
    """This process's device; each of several that torchrun started has its own.

    For the block they are one job: a default process group, NCCL between GPUs and gloo between CPUs.

    Raises ValueError if PyTorch cannot use the device here, or there are fewer than processes.
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
    # After any other error the rest of the job may be gone, and would be waited for.
    _leave_job()


def _leave_job() -> None:
    """Destroy the process group, and let gloo's threads release the tensors of the last collectives.

    They need the interpreter for it, are not waited for, and abort the process if the interpreter is ending by then.
    """
    from torch import distributed

    distributed.destroy_process_group()
    time.sleep(LEAVING)
