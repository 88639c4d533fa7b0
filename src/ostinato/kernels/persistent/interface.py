"""The interface of a device's kernels, as types.

Each device's package, and ``reference.py``, is a module that implements :class:`Kernels`; mypy checks this where
``backends.py`` imports them.  Modules import from ``defaults.py`` what their device does not support.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ostinato.kernels.persistent.arguments import Arguments, Layer, Saved
from ostinato.kernels.persistent.plan import Call, KernelPath, Plan
from ostinato.kernels.persistent.sequences import Sequences

ForwardResults = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""What ``forward`` returns, see ``reference.py``: output, h_n, c_n, and a tensor saved for the backward pass."""

LoopGradients = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""What ``backward`` returns: gradients of the gates' pre-activations, of h0 and c0, and rows to sum for the biases."""


class SmallProducts(Protocol):
    """The matrix products of small layers, with less overhead than those of ``matmul/gemm.py``."""

    def is_small(
        self, device: int, dtype: torch.dtype, rows: int, width: int, channels: int, training: bool, captured: bool, /
    ) -> bool:
        """Whether the products of so many rows with (width, channels) matrices are faster here."""

    def linear(self, tf32: bool, /, *products: tuple[Tensor, Tensor, Tensor | None, Tensor | None]) -> list[Tensor]:
        """``F.linear`` of the input, weights and bias of each of `products`, written to its fourth tensor, if given.

        ``tf32``: whether float32 may be rounded to tf32.
        """

    def gradients(
        self, tf32: bool, /, *directions: tuple[Arguments, Tensor, LoopGradients, int]
    ) -> list[tuple[Tensor | None, ...]]:
        """The gradients of each direction's DIFFERENTIABLE inputs, None for those that are not needed.

        A direction is given by its arguments, h, what ``backward`` returned, and the bits of the needed gradients.
        """


LayerStep = Any
"""One step of one layer: an object whose type is the device's own; only its ``StepOfLayers`` calls it."""


class Step(Protocol):
    """One step of stacked layers, one layer after the other, prepared for the shapes of an input and of states."""

    def __call__(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], /
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The output and the next states, given a contiguous input and states, if any, and all layers' weights.

        The weights are in torch.nn's order.  None if torch's layers must compute the step.
        """


class StepOnCPU(Step, Protocol):
    """A step on the CPU, which can also write its results to existing memory, or save what its gradients need."""

    def into(
        self,
        output: Tensor,
        new: Sequence[Tensor],
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        /,
    ) -> bool:
        """Write the results to `output` and `new`; returns False if torch's layers must compute the step."""

    def with_saved(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], /
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The results, and for dense layers the tensors that the step's gradients need."""


class Kernels(Protocol):
    """The kernels of a device, for one layer and direction."""

    # Whole sequences.

    def make_plan(self, call: Call, mask_hh: Tensor | None, block: tuple[int, int] | None, tf32: bool, /) -> Plan:
        """How a call runs, given the shape of its pruned blocks, if any, and whether products may round to tf32."""

    def least_steps(self, cell: str, hidden_size: int, batch: int, dtype: torch.dtype, both: bool, /) -> int:
        """The least number of steps for these kernels: torch's run calls of fewer steps that have no resets.

        ``both``: whether the layer has both directions.
        """

    def keeps_gates(self, cell: str, /) -> bool:
        """Whether ``forward`` leaves the gates' pre-activations in `projected` for ``backward``."""

    # The next four are specified by the functions of the same name in ``reference.py``.

    def forward(self, layer: Layer, projected: Tensor, plan: Plan, keep: bool, /) -> ForwardResults: ...

    def backward(
        self, layer: Layer, saved: Saved, upstream: Sequence[Tensor | None], plan: Plan, /
    ) -> LoopGradients: ...

    def gradients_of_biases(self, totals: Tensor, dtype: torch.dtype, cell: str, /) -> tuple[Tensor, Tensor]: ...

    def previous(self, rows: Tensor, first: Tensor | None, sequences: Sequences, /) -> Tensor: ...

    @property
    def small(self) -> SmallProducts | None:
        """The products of small layers, in place of those of ``matmul/gemm.py``; None if the device has none."""

    # Single steps.

    def most_single_steps(self, cell: str, hidden_size: int, batch: int, dtype: torch.dtype, /) -> int:
        """The most steps, without gradients, resets or masks, for which successive single steps are fastest."""

    def step_of(
        self,
        cell: str,
        dtype: torch.dtype,
        hidden_size: int,
        input_size: int,
        batch: int,
        mask_ih: Tensor | None,
        mask_hh: Tensor | None,
        path: KernelPath | None,
        /,
    ) -> LayerStep | None:
        """One step of a layer without gradients, prepared for these sizes; None if torch's kernels are as fast."""

    def StepOfLayers(self, steps: Sequence[LayerStep], x: Tensor, state_shape: tuple[int, ...], states: int, /) -> Step:
        """The steps of stacked layers as one, for inputs like x and this number of states of this shape."""


class KernelsOfGPU(Kernels, Protocol):
    """The kernels of a GPU, which can run several layers at the same time.

    Stacked layers run in a wavefront, each on another chunk of steps; both directions of a layer in a single launch.
    """

    def check(self, device: int, /) -> None:
        """Raise RuntimeError if an earlier kernel failed; does not wait for running ones."""

    def layers_at_once(
        self, call: Call, layers: int, mask_hh: Tensor | None, block: tuple[int, int] | None, tf32: bool, /
    ) -> int:
        """How many of so many stacked layers run at the same time; ``call`` is that of a single layer."""

    def chunks(self, call: Call, plan: Plan, /) -> int:
        """The number of chunks into which layers that run at the same time cut their steps."""

    def forward(
        self, layer: Layer, projected: Tensor, plan: Plan, keep: bool, into: tuple[Tensor, Tensor] | None = None, /
    ) -> ForwardResults:
        """The forward of :class:`Kernels`, which writes its first and last result `into` these tensors, if given."""

    def backward(
        self,
        layer: Layer,
        saved: Saved,
        upstream: Sequence[Tensor | None],
        plan: Plan,
        into: tuple[Tensor, Tensor] | None = None,
        /,
    ) -> LoopGradients:
        """The backward of :class:`Kernels`, which writes its first and last result `into` these tensors, if given."""

    def forward_both(self, *directions: tuple[Layer, Tensor, Plan, bool]) -> list[ForwardResults]:
        """``forward`` of both directions of a layer in one launch, given the arguments of each and a plan for both."""

    def backward_both(self, *directions: tuple[Layer, Saved, Sequence[Tensor | None], Plan]) -> list[LoopGradients]:
        """``backward`` of both directions of a layer in one launch, given the arguments of each."""


class KernelsOfCPU(Kernels, Protocol):
    """The kernels of the CPU, which also has single steps with constant weights, and gradients of single steps."""

    def FrozenStep(
        self, cell: str, batch: int, weights: list[Tensor], mask_ih: Tensor | None, mask_hh: Tensor | None, /
    ) -> LayerStep:
        """One step of a layer with these constant weights, packed if pruned; used like that of ``step_of``."""

    def StepOfLayers(
        self, steps: Sequence[LayerStep], x: Tensor, state_shape: tuple[int, ...], states: int, /
    ) -> StepOnCPU:
        """See :class:`Kernels`."""

    def gradients_of_step(
        self,
        cell: str,
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
        /,
    ) -> Sequence[Tensor | None]:
        """The gradients of the input, states and weights of a step of layers, None where not `needed`.

        They follow from what the step `saved`, and from the gradients of its results, None for zeros.
        """
