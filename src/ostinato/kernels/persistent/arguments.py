"""What a recurrent layer and direction is: the arguments of the operator, and what the kernels are given of them."""

from typing import Any, NamedTuple

from torch import Tensor

from ostinato.kernels.persistent.plan import KernelPath
from ostinato.kernels.persistent.sequences import Sequences


class Layer(NamedTuple):
    """A recurrent layer and direction, but for the product with its input."""

    cell: str  # of GATES; or, of a recurrence with recurrent weights, "generated"
    weight_hh: Tensor  # (gates * H, H), the gates in torch.nn's order; where mask_hh is False zero, or not read
    bias_hh: Tensor | None  # (gates * H,)
    mask_hh: Tensor | None  # bool, as weight_hh
    h0: Tensor | None  # (B, H), the initial state, None for zeros
    c0: Tensor | None  # the same of the second state: an LSTM's cell
    sequences: Sequences  # of the rows of what goes in and comes out
    packed_weights: dict[Any, Tensor] | None = None  # if given, a GPU's launches pack weight_hh once and find it here


class Saved(NamedTuple):
    """What the backward needs of the forward."""

    pre: Tensor  # (rows, gates * H), p + q; for a GRU's n only p; of an RNN h itself, which determines the derivative
    candidate: Tensor | None  # (rows, H), a GRU's q of n
    h: Tensor  # (rows, H), the state after each step
    c: Tensor | None  # (rows, H), of an LSTM, in float32 or float64


class Arguments(NamedTuple):
    """The arguments of the operator ``recurrent_layer``, in its order: tensors, then settings.

    On a GPU weight_hh may be any number where mask_hh is False, unless it is trained.
    """

    x: Tensor
    h0: Tensor | None
    c0: Tensor | None
    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    mask_hh: Tensor | None
    offsets: Tensor | None
    resets: Tensor | None
    batch: int
    cell: str
    reverse: bool
    training: bool
    path: KernelPath | None
    at_once: int

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.batch, self.offsets, self.resets, self.reverse)

    @property
    def layer(self) -> Layer:
        return Layer(self.cell, self.weight_hh, self.bias_hh, self.mask_hh, self.h0, self.c0, self.sequences)


INPUTS = len(Arguments._fields)  # the backward's other arguments come after them
TENSORS = Arguments._fields.index("batch")  # the first are tensors
DIFFERENTIABLE = Arguments._fields[: Arguments._fields.index("mask_hh")]
NOTHING = (None,) * (INPUTS - len(DIFFERENTIABLE))  # the gradients of the other inputs
NEEDED_BITS = tuple(1 << i for i in range(len(DIFFERENTIABLE)))  # of the backward's `needed`: whose gradients are
