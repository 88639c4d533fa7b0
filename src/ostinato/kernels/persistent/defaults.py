"""Substitutes for kernels that a device does not have: torch's kernels run its layers."""

from typing import NoReturn

from torch import Tensor

from ostinato.kernels.persistent.plan import Call, Plan, no_kernel

small = None


def make_plan(call: Call, mask_hh: Tensor | None, block: tuple[int, int] | None, tf32: bool) -> Plan:
    return no_kernel(f"layers on {call.device.type} run in torch's own kernels")


def least_steps(*_: object) -> int:
    return 0


def most_single_steps(*_: object) -> int:
    return 0


def step_of(*_: object) -> None:
    return None


def StepOfLayers(*_: object) -> NoReturn:
    raise AssertionError("step_of returns no step on this device")
