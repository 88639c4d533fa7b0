"""One recurrent layer and direction: the arguments of the operator and of its kernels, and the tensors they save."""

from typing import Any, NamedTuple

from torch import Tensor

from ostinato.kernels.persistent.plan import KernelPath
from ostinato.kernels.persistent.sequences import Sequences


class Layer(NamedTuple):
    """A recurrent layer and direction, without the product with its input."""

    cell: str  # a key of GATES; or "generated" for a user-defined recurrence with recurrent weights
    weight_hh: Tensor  # (gates * H, H), gates in torch.nn's order; where mask_hh is False, zero or not read
    bias_hh: Tensor | None  # (gates * H,)
    mask_hh: Tensor | None  # bool, the shape of weight_hh
    h0: Tensor | None  # (B, H), the initial hidden state, None for zeros
    c0: Tensor | None  # (B, H), the initial second state: an LSTM's cell state
    sequences: Sequences  # the layout of the rows of inputs and outputs
    packed_weights: dict[Any, Tensor] | None = None  # if given, a GPU's launches pack weight_hh once and reuse it


class Saved(NamedTuple):
    """The saved tensors that the backward pass needs; p and q are those of ``reference.forward``."""

    pre: Tensor  # (rows, gates * H), p + q, but only p for a GRU's n; for an RNN h, from which its derivative follows
    candidate: Tensor | None  # (rows, H), a GRU's q of n
    h: Tensor  # (rows, H), the state after each step
    c: Tensor | None  # (rows, H), an LSTM's cell state, in float32 or float64


class Arguments(NamedTuple):
    """The arguments of the operator ``recurrent_layer``, in its order: tensors, then settings.

    On a GPU, entries of weight_hh where mask_hh is False may have any value, unless the layer is trained.
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


INPUTS = len(Arguments._fields)  # the backward operator's other arguments come after these
TENSORS = Arguments._fields.index("batch")  # the number of tensors, which come first
DIFFERENTIABLE = Arguments._fields[: Arguments._fields.index("mask_hh")]
NOTHING = (None,) * (INPUTS - len(DIFFERENTIABLE))  # the gradients of the other inputs
NEEDED_BITS = tuple(1 << i for i in range(len(DIFFERENTIABLE)))  # in the backward's `needed`: one for each gradient
