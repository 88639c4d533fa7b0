"""The base class of layers that run a recurrence, in each layer and direction."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.episodes import in_reverse
from ostinato.kernels.recurrence.weighted.definition import with_products
from ostinato.layers import StackedLayers
from ostinato.recurrence import Recurrence, takes_steps
from ostinato.replay import recording
from ostinato.states import Hidden, State, each, of_one_layer, stacked, states_of

Run = Callable[..., tuple[Any, Any]]
Parameters = dict[str, Any]  # tensors by name, None for an absent bias


class RecurrenceLayers(StackedLayers[State]):
    """Layers that run a :func:`ostinato.recurrence`; see :meth:`_run_cell`."""

    reads_packed = False  # whether :meth:`_run_layer` takes the rows of a PackedSequence as they lie

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        """The outputs and last states of one layer in one direction, from its parameters `p`, by name, and its input.

        ``run(recurrence, *arguments)`` calls the recurrence, time and batch laid out as in `x`, and returns the states
        and the last ones; recurrent weights are its option ``weight_hh``.  The recurrence's sequences may be
        concatenated in one argument, and its parameters in another.  Where the recurrence has two states and the layer
        one, both start from the layer's.
        """
        raise NotImplementedError

    def _run_layers(
        self, x: Tensor, hx: Hidden | None, offsets: Tensor | None, resets: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Hidden]:
        if offsets is None or self.reads_packed:
            return super()._run_layers(x, hx, offsets, resets, batch_first)
        # Recurrences take rows sequence by sequence (`cu_seqlens`), while a PackedSequence has them step by step.
        rows = torch.arange(x.shape[0], device=x.device)
        step = torch.searchsorted(offsets, rows, right=True) - 1
        sequence = rows - offsets[step]
        order = torch.argsort(sequence, stable=True)
        batch = states_of(hx)[0].shape[1]
        lengths = torch.zeros(batch, dtype=torch.int32, device=x.device).index_add_(
            0, sequence, torch.ones_like(sequence, dtype=torch.int32)
        )
        bounds = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        resets = None if resets is None else resets[order][None]
        y, h_n = super()._run_layers(x[order][None], hx, bounds, resets, True)
        return y[0, torch.argsort(order)], h_n

    def _run_layer(
        self,
        layer: int,
        x: Tensor,
        h0: Any,
        offsets: Tensor | None,
        resets: Tensor | None,
        batch_first: bool,
    ) -> tuple[Tensor, Any]:
        """As documented in the base class, but ``offsets`` are the ``cu_seqlens`` of concatenated sequences."""
        resets = None if resets is None else resets if batch_first else resets.t()
        outputs: list[Tensor] = []
        lasts: list[Any] = []
        for direction, suffix in enumerate(self._parameter_suffixes(layer)):
            reverse = direction == 1
            own_resets = in_reverse(resets, True, offsets) if reverse and resets is not None else resets
            own_h0 = h0 if h0 is None else each(operator.itemgetter(direction), h0)
            options = {"h0": own_h0, "resets": own_resets, "reverse": reverse, "cu_seqlens": offsets}
            run = functools.partial(self._run_recurrence, options, batch_first)
            y, h_last = self._run_cell(suffix, self._parameters_of(suffix, x.shape[-1]), x, run)
            outputs.append(y)
            lasts.append(each(of_one_layer, h_last))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)), stacked(lasts)

    def _step_of_layer(self, layer: int, x: Tensor, h0: Any) -> tuple[Tensor, Hidden]:
        """One step; on a CPU without gradients, by :meth:`_run_cell` of tensors without a dimension of time."""
        parameters = self._parameters_of(f"l{layer}", x.shape[-1])
        states = [state[0] for state in states_of(h0)]
        tensors = [x, *states, *(y for y in parameters.values() if y is not None)]
        if torch.is_autocast_enabled("cpu") or not takes_steps(tensors, self.backend):
            step, recorder = super()._step_of_layer, recording()
            return step(layer, x, h0) if recorder is None else recorder.call(step, layer, x, h0)
        states = states or [x.new_zeros(len(x), self.hidden_size)] * self.states
        y, after = self._run_cell(f"l{layer}", parameters, x, functools.partial(_run_step, states))
        return y, each(lambda state: state[None], after)

    def _run_recurrence(
        self,
        options: dict[str, Any],
        batch_first: bool,
        function: Recurrence,
        *arguments: Tensor,
        weight_hh: Tensor | None = None,
    ) -> tuple[Any, Any]:
        """The ``run`` of :meth:`_run_cell` for whole sequences."""
        h0 = options["h0"]
        if function.states == 2 and isinstance(h0, Tensor):
            options = {**options, "h0": (h0, h0)}
        are_concatenated = len(arguments) < len(function.names)
        run: Run = function.of_layer if are_concatenated else function
        if self.sequence_group is not None:
            from ostinato import distributed

            if are_concatenated:
                arguments = function.split_arguments(*arguments)
            run = functools.partial(distributed.run_recurrence, function, group=self.sequence_group())
        if weight_hh is not None:
            options = {**options, "weight_hh": weight_hh}
        if batch_first:
            return run(*arguments, **options, backend=self.backend)
        arguments = tuple(x.transpose(0, 1) if x.dim() == 3 else x for x in arguments)
        h, h_last = run(*arguments, **options, backend=self.backend)
        return each(lambda x: x.transpose(0, 1), h), h_last


def _run_step(
    states: list[Tensor], function: Recurrence, *arguments: Tensor, weight_hh: Tensor | None = None
) -> tuple[Any, Any]:
    """The ``run`` of :meth:`RecurrenceLayers._run_cell` for a single step."""
    if len(arguments) < len(function.names):
        arguments = function.split_arguments(*arguments)
    if function.states == 2 and len(states) == 1:
        states = states * 2
    after = function.step(arguments if weight_hh is None else with_products(arguments, states[0], weight_hh), states)
    result = tuple(after) if function.states > 1 else after[0]
    return result, result
