"""The arguments and the interface of the executors of recurrences with recurrent weights."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ostinato.kernels.persistent.sequences import Sequences
from ostinato.kernels.recurrence.symbolic.trace import Trace
from ostinato.kernels.recurrence.weighted.definition import width_of


class Layer(NamedTuple):
    """A recurrence with weights, except for its N sequences, which executors take separately as rows, (rows, N * D).

    Attributes:
        trace: the trace of the function, whose first arguments are sequences.
        weight_hh: (G * D, D); its products with the previous state are added to the first G arguments.  Or, of H heads,
            (H, G * D / H, D / H), the matrix of each, whose products are with the head's part of the state.
        parameters: the arguments per channel, (P, D).
        initial: the initial states, (sequences, D) each; None for zeros.
        sequences: which rows are which steps of which sequences.
    """

    trace: Trace
    weight_hh: Tensor
    parameters: Tensor
    initial: Sequence[Tensor] | None
    sequences: Sequences

    @property
    def width(self) -> int:
        """D, the number of channels of a state and of each argument."""
        return width_of(self.weight_hh)

    @property
    def heads(self) -> int:
        """H, 1 for a matrix of all channels."""
        return self.weight_hh.shape[0] if self.weight_hh.dim() == 3 else 1

    @property
    def products(self) -> int:
        """G, the number of arguments to which products are added."""
        return self.weight_hh.shape[-2] // self.weight_hh.shape[-1]

    @property
    def with_products(self) -> int:
        """G * D, the number of leading columns of the rows to which products are added."""
        return self.products * self.width

    def by_head(self, x: Tensor) -> Tensor:
        """(rows, n * D) as (H, rows, n, D / H), a view."""
        return x.unflatten(-1, (-1, self.heads, self.width // self.heads)).permute(2, 0, 1, 3)


class Executor(Protocol):
    """Computes all steps in rows: ``stepwise.py`` does, and on a GPU ``persistent.py``."""

    def forward(
        self, layer: Layer, rows: Tensor, training: bool, /
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """The states after every step, (rows, D) each, and the last ones, (sequences, D) each.

        ``rows`` are the arguments, without products.  For the backward pass of training the arguments with the products
        added come third.
        """

    def backward(
        self,
        layer: Layer,
        rows: Tensor,
        before: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        grads_last: Sequence[Tensor | None],
        /,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Gradients of the rows, of the parameters, (P, D), in at least float32, and of the initial states.

        ``rows`` are what the forward pass kept of the arguments, ``before`` the states before each step, (rows, D)
        each, and ``grads`` and ``grads_last`` the gradients of what the forward returned, None for zeros.
        """
