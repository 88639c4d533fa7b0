"""PyTorch's modes around a call of a layer: function transforms, FLOP counters, autocast."""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode

from ostinato.kernels.operators.eager import is_dense
from ostinato.kernels.operators.export import constant_to_compilers
from ostinato.kernels.persistent.arguments import INPUTS, NEEDED_BITS, Arguments

_KINDS = torch._C._functorch.TransformType
_VMAP, _JVP, _FUNCTIONALIZE = _KINDS.Vmap, _KINDS.Jvp, _KINDS.Functionalize


def can_take(tensors: list[Tensor]) -> bool:
    """Whether the operator can be called: it supports no tangents, no ``functionalize``, and only dense tensors."""
    if forward_ad._current_level >= 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is None:
        return all(map(is_dense, tensors))
    return _FUNCTIONALIZE not in _transforms()


def count_operations() -> None:
    """Tell active FLOP counters of PyTorch, which are dispatch modes, how many operations a layer takes."""
    if not is_in_torch_dispatch_mode():
        return
    from torch.utils.flop_counter import FlopCounterMode  # warns where there is a GPU without Triton

    formulas = _formulas()
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(counter := getattr(mode, "counter", None), FlopCounterMode):
            counter.flop_registry.update(formulas)  # a copy that it has made of PyTorch's registry


@functools.cache
def _formulas() -> dict[Any, Callable]:
    """Register the operators' FLOP formulas for all later counters; returns them by operator."""
    from torch.utils import flop_counter

    def forward(x: Any, _h0: Any, _c0: Any, weight_ih: Any, weight_hh: Any, *_: Any, out_shape: Any) -> int:
        return 2 * x[0] * (math.prod(weight_ih) + math.prod(weight_hh))

    def backward(*args: Any, out_shape: Any) -> int:
        arguments, needed = Arguments(*args[:INPUTS]), args[-1]
        dx, dh0, _, d_weight_ih, d_weight_hh, *_ = (bool(needed & bit) for bit in NEEDED_BITS)
        rows, first = arguments.x[0], 0 if dh0 else arguments.batch  # the first step's rows are multiplied for h0 alone
        input_products = (dx + d_weight_ih) * rows * math.prod(arguments.weight_ih)
        return int(2 * (input_products + ((1 + d_weight_hh) * rows - first) * math.prod(arguments.weight_hh)))

    operators = torch.ops.ostinato.recurrent_layer, torch.ops.ostinato.recurrent_layer_backward
    flop_counter.register_flop_formula(operators[0])(forward)
    flop_counter.register_flop_formula(operators[1])(backward)
    return {operator: flop_counter.flop_registry[operator] for operator in operators}


@constant_to_compilers
def is_vmapped() -> bool:
    """Whether ``torch.vmap`` is among the function transforms: torch's kernels have no rule for it."""
    return _VMAP in _transforms()


def is_vmapped_last() -> bool:
    """Whether ``torch.vmap`` is the innermost function transform."""
    return _transforms()[-1:] == [_VMAP]


def is_pushed_forward() -> bool:
    """Whether ``torch.func.jvp`` is among the function transforms: torch's kernels cannot read batch sizes in it."""
    return _JVP in _transforms()


def _transforms() -> list[Any]:
    """The kinds of the function transforms, the innermost last."""
    return [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()]


def without_autocast(device_type: str) -> AbstractContextManager:
    """A context that disables autocast, if it is enabled; autocast does not support the device "meta"."""
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()
