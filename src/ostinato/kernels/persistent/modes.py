"""PyTorch's modes around a call of a layer: function transforms, counters of operations, autocast."""

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
    """Whether the operator can be called: it has no rule for tangents, ``functionalize``, and tensors not dense."""
    if forward_ad._current_level >= 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is None:
        return all(map(is_dense, tensors))
    return _FUNCTIONALIZE not in _transforms()


def count_operations() -> None:
    """Tell PyTorch's counters of operations, which are dispatch modes, how many of them a layer takes."""
    if not is_in_torch_dispatch_mode():
        return
    from torch.utils.flop_counter import FlopCounterMode  # warns where there is a GPU without Triton

    formulas = _formulas()
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(counter := getattr(mode, "counter", None), FlopCounterMode):
            counter.flop_registry.update(formulas)  # which it has copied before


@functools.cache
def _formulas() -> dict[Any, Callable]:
    """The operations of the operators, which every later counter knows too."""
    from torch.utils import flop_counter

    def forward(x: Any, _h0: Any, _c0: Any, weight_ih: Any, weight_hh: Any, *_: Any, out_shape: Any) -> int:
        return 2 * x[0] * (math.prod(weight_ih) + math.prod(weight_hh))

    def backward(*args: Any, out_shape: Any) -> int:
        given, needed = Arguments(*args[:INPUTS]), args[-1]
        of_x, of_h0, _, of_weight_ih, of_weight_hh, *_ = (bool(needed & bit) for bit in NEEDED_BITS)
        rows, first = given.x[0], 0 if of_h0 else given.batch
        of_inputs = (of_x + of_weight_ih) * rows * math.prod(given.weight_ih)
        return int(2 * (of_inputs + ((1 + of_weight_hh) * rows - first) * math.prod(given.weight_hh)))

    here = torch.ops.ostinato
    flop_counter.register_flop_formula(here.recurrent_layer)(forward)
    flop_counter.register_flop_formula(here.recurrent_layer_backward)(backward)
    return {of: flop_counter.flop_registry[of] for of in (here.recurrent_layer, here.recurrent_layer_backward)}


@constant_to_compilers
def is_vmapped() -> bool:
    """Whether ``torch.vmap`` is among the function transforms: torch's kernels have no rule for it."""
    return _VMAP in _transforms()


def is_vmapped_last() -> bool:
    """Whether it is the innermost of them."""
    return _transforms()[-1:] == [_VMAP]


def is_pushed_forward() -> bool:
    """Whether ``torch.func.jvp`` is among the function transforms: torch's kernels cannot read batch sizes in it."""
    return _JVP in _transforms()


def _transforms() -> list[Any]:
    """The kinds of the function transforms, the innermost last."""
    return [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()]


def without_autocast(device_type: str) -> AbstractContextManager:
    """Disables autocast, if it is enabled; it does not know "meta"."""
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()
