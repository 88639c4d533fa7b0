"""Checks of arguments, whose errors name the argument, what it must be, and what was passed.

TypeError: an object of the wrong type, or a tensor of the wrong dtype or layout.  ValueError: a wrong value, shape or
device.
"""

import math
from numbers import Real

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ostinato.kernels.derived import derived_from
from ostinato.kernels.matmul.precision import autocast_dtype
from ostinato.kernels.operators.export import has_unknown_size, is_traced
from ostinato.kernels.scan.operators import shortened

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ONE_STEP = "(B, input_size) or (input_size,)"  # the shape of an input of one step


def check_integers(least: int | None = None, /, **numbers: int) -> None:
    """Raise TypeError unless all are integers, ValueError for one below ``least`` or that PyTorch cannot take."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):  # the latter in exported programs
            raise TypeError(f"{name} must be an int; got {type(value).__name__}")
        if least is not None and value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")
        if not torch.compiler.is_compiling() and value >= 1 << 63:  # a compiled program would keep this as a bound
            raise ValueError(f"{name} must be below 2**63; got {value}")


def parts_of(hidden_size: int, default: int, **number: int | None) -> int:
    """The number of equal parts of the hidden units, such as heads: the one given by its name, or else a divisor.

    That is the default, a power of 2, or the largest smaller one that divides.  Raises TypeError or ValueError unless
    the sizes are positive integers, and the number divides.
    """
    check_integers(1, hidden_size=hidden_size)
    ((name, count),) = number.items()
    count = math.gcd(hidden_size, default) if count is None else count
    check_integers(1, **{name: count})
    if hidden_size % count:
        raise ValueError(f"{name} must divide hidden_size, {hidden_size}; got {count}")
    return count


def check_numbers(**numbers: float) -> None:
    """Raise TypeError unless all are real numbers."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number; got {type(value).__name__}")


def check_flags(**flags: bool) -> None:
    """Raise TypeError unless all are True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool; got {type(value).__name__}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:  # an array compares element by element
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def check_dtype(dtype: object) -> None:
    """Raise TypeError unless it is one that layers compute in, or None for PyTorch's default."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOAT_DTYPES):
        raise TypeError(f"dtype must be None or one of {', '.join(map(str, FLOAT_DTYPES))}; got {dtype!r}")


def check_tensor(name: str, x: object) -> None:
    """Raise TypeError unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {describe(x)}")


def check_floating(name: str, x: object, dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES) -> None:
    """Raise TypeError unless `x` is a dense tensor of one of the dtypes."""
    if not isinstance(x, Tensor) or x.dtype not in dtypes:
        kind = "real floating" if dtypes == FLOAT_DTYPES else "floating"
        raise TypeError(f"{name} must be a tensor of a {kind} dtype; got {describe(x)}")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{name} must be a dense tensor; got a {kind} one")


def check_unsharded(caller: str, sequence_group: object) -> None:
    """Raise ValueError if a module takes shards of sequences (:func:`ostinato.distributed.sequence_parallel`)."""
    if sequence_group is not None:
        raise ValueError(f"{caller} needs a module of whole sequences; this one takes shards of them")


def check_resets(resets: object, name: str, x: Tensor) -> None:
    """Raise TypeError or ValueError unless `resets` is a bool tensor over the steps of the input, on its device."""
    if not isinstance(resets, Tensor) or resets.dtype != torch.bool:
        raise TypeError(f"resets must be a bool tensor; got {describe(resets)}")
    if resets.shape != x.shape[:-1]:
        expected = f"{tuple(x.shape[:-1])}, that of {name} without its last dimension"
        raise ValueError(f"resets must have shape {expected}; got {tuple(resets.shape)}")
    if resets.device != x.device:
        raise ValueError(f"resets must be on the device of {name}, {x.device}; got {resets.device}")


def check_packed(packed: PackedSequence, hx: object = None) -> int:
    """The number of packed sequences.

    Raises ValueError unless the batch sizes fit the rows, which kernels index by them, and the indices fit the batch.

    In compiled programs the sizes are known only at run time, where the error is a RuntimeError.  Shapes cannot be
    compared with them, so the number of sequences is that of the initial state, if given, and is checked at run time.
    """
    sizes, rows = packed.batch_sizes, len(packed.data)
    orders = {name: getattr(packed, name) for name in ("sorted_indices", "unsorted_indices")}
    if torch.compiler.is_compiling():
        if is_traced() and has_unknown_size(sizes):
            raise NotImplementedError(
                "torch.export cannot trace how a model packs sequences, whose number of steps it does not know: "
                "export a model of packed or padded sequences"
            )
        fits = (sizes.diff() <= 0).all() & (sizes[-1] >= 1) & (sizes.sum() == rows)
        torch._assert_async(fits, "input.batch_sizes must be positive, never rise, and add up to the rows of input")
        for name, indices in orders.items():
            if indices is not None:
                torch._assert_async(sizes[0] == len(indices), f"input.{name} must have an index for each sequence")
        state = hx[0] if isinstance(hx, (tuple, list)) and hx else hx
        if not (isinstance(state, Tensor) and state.dim() == 3):  # there is none, or the caller raises
            if is_traced():
                raise NotImplementedError(
                    "torch.export needs an initial state for packed sequences, which tells how many there are, or "
                    "strict=True"
                )
            return int(sizes[0])
        torch._assert_async(sizes[0] == state.shape[1], "hx must have a state for each sequence of input")
        return state.shape[1]
    batch: int = derived_from(sizes, ("rows", rows), lambda: _checked_batch(sizes, rows), by_value=True)
    for name, indices in orders.items():
        if indices is not None and len(indices) != batch:
            raise ValueError(f"input.{name} must have an index for each of {batch} sequences; got {len(indices)}")
    return batch


def _checked_batch(batch_sizes: Tensor, rows: int) -> int:
    is_falling = len(batch_sizes) > 0 and batch_sizes[-1] >= 1 and not (batch_sizes[1:] > batch_sizes[:-1]).any()
    if not is_falling or batch_sizes.sum() != rows:
        raise ValueError(
            f"input.batch_sizes must be positive, never rise, and add up to its {rows} rows; "
            f"got {shortened(batch_sizes)}"
        )
    return int(batch_sizes[0])


def describe(x: object) -> str:
    """The type of an argument, for an error message."""
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"{type(x).__name__}"


def check_input(
    x: Tensor, input_size: int, weight: Tensor, ranks: tuple[int, ...], shape: str, name: str = "input"
) -> None:
    """Raise TypeError or ValueError unless `x` is a valid input of a layer or cell with this weight."""
    check_floating(name, x)
    if x.dim() not in ranks:
        raise ValueError(f"{name} must have shape {shape}; got {tuple(x.shape)}")
    if x.shape[-1] != input_size:
        raise ValueError(f"{name} must have input_size = {input_size} features last; got shape {tuple(x.shape)}")
    check_like_weight(name, x, weight)


def check_like_weight(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError or TypeError unless `x` has the weight's device and, except under autocast, its dtype."""
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the module's device, {weight.device}; got {x.device}")
    if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
        raise TypeError(f"{name} must have the parameters' dtype, {weight.dtype}; got {x.dtype}")
