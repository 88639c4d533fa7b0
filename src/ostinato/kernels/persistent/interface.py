"""What the kernels of a device offer, as types.

:class:`Kernels` is what each device's package, and ``reference.py``, is a module of; mypy checks that they are where
``backends.py`` imports them.  What a device does not offer it takes from ``defaults.py``.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ostinato.kernels.persistent.arguments import Arguments, Layer, Saved
from ostinato.kernels.persistent.plan import Call, KernelPath, Plan
from ostinato.kernels.persistent.sequences import Sequences

ForwardResults = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""What ``forward`` returns, see ``reference.py``: output, h_n, c_n, and what is kept for the backward."""

LoopGradients = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""What ``backward`` returns: gradients of the gates, before their activations, of h0 and c0, and rows to sum."""


class SmallProducts(Protocol):
    """The products of small layers with less overhead than those of ``matmul/gemm.py``."""

    def is_small(
        self, device: int, dtype: torch.dtype, rows: int, width: int, channels: int, training: bool, captured: bool, /
    ) -> bool:
        """Whether the products of so many rows with matrices of (width, channels) are better computed here."""

    def linear(self, tf32: bool, /, *products: tuple[Tensor, Tensor, Tensor | None, Tensor | None]) -> list[Tensor]:
        """The product of each input, weights and bias, written to its fourth tensor, if given.

        ``tf32``: whether float32 may be rounded to tf32.
        """

    def gradients(
        self, tf32: bool, /, *directions: tuple[Arguments, Tensor, LoopGradients, int]
    ) -> list[tuple[Tensor | None, ...]]:
        """The gradients of each's DIFFERENTIABLE inputs, of h and what ``backward`` has found, as far as needed."""


LayerStep = Any
"""One step of one layer: an object of the device's own, that only its ``StepOfLayers`` calls."""


class Step(Protocol):
    """One step of stacked layers, one after the other, prepared for the shapes of an input and of states."""

    def __call__(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], /
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The output and the next states, given a contiguous input and states, if any, and all layers' weights.

        These are in torch.nn's order.  None where torch's layers must compute the step.
        """


class StepOnCPU(Step, Protocol):
    """What only steps on the CPU have: results in given memory, and what gradients need."""

    def into(
        self,
        output: Tensor,
        new: Sequence[Tensor],
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        /,
    ) -> bool:
        """A call that writes to the memory of its results; False where torch's layers must compute the step."""

    def with_saved(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], /
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """A call for dense layers that returns what their gradients need as well."""


class Kernels(Protocol):
    """A layer and direction on a device."""

    # Whole sequences.

    def make_plan(self, call: Call, mask_hh: Tensor | None, block: tuple[int, int] | None, tf32: bool, /) -> Plan:
        """How a call runs, given its pruned blocks' shape, if any, and whether products may round to tf32."""

    def least_steps(self, cell: str, hidden_size: int, batch: int, dtype: torch.dtype, both: bool, /) -> int:
        """Fewer steps, without resets, are always left to torch's kernels; ``both`` directions, or one."""

    def keeps_gates(self, cell: str, /) -> bool:
        """Whether ``forward`` leaves the gates' pre-activations in `projected` for ``backward``."""

    def forward(self, layer: Layer, projected: Tensor, plan: Plan, keep: bool, /) -> ForwardResults:
        """As :func:`ostinato.kernels.persistent.reference.forward`, as are the others the reference's."""

    def backward(
        self, layer: Layer, saved: Saved, upstream: Sequence[Tensor | None], plan: Plan, /
    ) -> LoopGradients: ...

    def gradients_of_biases(self, totals: Tensor, dtype: torch.dtype, cell: str, /) -> tuple[Tensor, Tensor]: ...

    def previous(self, rows: Tensor, first: Tensor | None, sequences: Sequences, /) -> Tensor: ...

    @property
    def small(self) -> SmallProducts | None:
        """What computes the products of small layers together, in place of ``matmul/gemm.py``."""

    # Single steps.

    def most_single_steps(self, cell: str, hidden_size: int, batch: int, dtype: torch.dtype, /) -> int:
        """Up to how many steps, without gradients, resets or masks, are fastest one by one."""

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
        """What makes one step of a layer without gradients; None where torch's kernels are as fast."""

    def StepOfLayers(self, steps: Sequence[LayerStep], x: Tensor, state_shape: tuple[int, ...], states: int, /) -> Step:
        """Steps of stacked layers, one after the other, for inputs like x and so many states of that shape."""


class KernelsOfGPU(Kernels, Protocol):
    """What only a GPU has: several layers at the same time.

    Stacked layers run in a wavefront, each on another chunk of the steps; both directions of one in a single launch.
    """

    def check(self, device: int, /) -> None:
        """Raise RuntimeError if an earlier kernel failed; does not wait for those that run."""

    def layers_at_once(
        self, call: Call, layers: int, mask_hh: Tensor | None, block: tuple[int, int] | None, tf32: bool, /
    ) -> int:
        """How many of so many layers run at the same time; ``call`` is that of one alone."""

    def chunks(self, call: Call, plan: Plan, /) -> int:
        """In how many chunks of the steps."""

    def forward(
        self, layer: Layer, projected: Tensor, plan: Plan, keep: bool, into: tuple[Tensor, Tensor] | None = None, /
    ) -> ForwardResults:
        """As that of :class:`Kernels`; the output and what is kept of cells are written `into` these, if given."""

    def backward(
        self,
        layer: Layer,
        saved: Saved,
        upstream: Sequence[Tensor | None],
        plan: Plan,
        into: tuple[Tensor, Tensor] | None = None,
        /,
    ) -> LoopGradients:
        """As that of :class:`Kernels`; the gradients of gates and their totals are written `into` these, if given."""

    def forward_both(self, *directions: tuple[Layer, Tensor, Plan, bool]) -> list[ForwardResults]:
        """``forward`` of both directions of a layer in one launch, given the arguments of each, by a plan for that."""

    def backward_both(self, *directions: tuple[Layer, Saved, Sequence[Tensor | None], Plan]) -> list[LoopGradients]:
        """``backward`` of both directions, as that."""


class KernelsOfCPU(Kernels, Protocol):
    """What only the CPU has: steps whose weights never change, and gradients of steps."""

    def FrozenStep(
        self, cell: str, batch: int, weights: list[Tensor], mask_ih: Tensor | None, mask_hh: Tensor | None, /
    ) -> LayerStep:
        """What makes a step of a layer, in place of that of ``step_of``, with these weights packed."""

    def StepOfLayers(
        self, steps: Sequence[LayerStep], x: Tensor, state_shape: tuple[int, ...], states: int, /
    ) -> StepOnCPU:
        """As that of :class:`Kernels`."""

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
        """Of what a step of layers was given, as far as `needed`, from what it saved and the results' gradients."""
