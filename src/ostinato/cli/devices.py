"""The device a command runs on."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def choose_device(name: str) -> "torch.device":
    """The device called ``name``; "auto" is the accelerator if there is one, the CPU otherwise.

    Raises ValueError if PyTorch cannot use it here.
    """
    import torch

    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except NotImplementedError:  # torch lists all its backends
        reason = "this PyTorch was built without it"
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
    raise ValueError(f"device must be auto, or one that PyTorch can use here; got {name!r} ({reason})")
