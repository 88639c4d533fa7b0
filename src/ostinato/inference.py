"""Recurrent layers without gradient: weights packed once for the kernels, all steps of a layer in one call."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.kernels import nvrtc
from ostinato.kernels.gemm import linear
from ostinato.kernels.persistent.plan import GATES, Plan, no_kernel
from ostinato.masks import block_of, mask_of, masked

Segment = tuple[int, int, int]  # steps of the same sequences: the first one's first row, how many, of how many


class Packed:
    """The weights of an RNN, GRU or LSTM as they are now, and the kernels made from them so far.

    ``module`` itself is not kept, so that a weak dictionary from modules to these lets go of both.  ``tensors``
    are its :func:`tensors_of`; ``weights`` are zero where they are pruned.
    """

    def __init__(self, module: nn.RNNBase, tensors: dict[str, Tensor]) -> None:
        self.cell = module.mode.lower()
        self.hidden_size = module.hidden_size
        self.directions = 2 if module.bidirectional else 1
        self._seen = {name: _Seen(tensor) for name, tensor in tensors.items()}
        with torch.no_grad():
            self.weights = {name: masked(module, name) for name in module._flat_weights_names}
        self._names = [name for name in self.weights if name.startswith("weight_hh")]
        masks = [mask for name in self._names if (mask := mask_of(module, name)) is not None]
        self._masks = masks if len(masks) == len(self._names) else []  # one dense layer: all run as such
        blocks = {block_of(mask, GATES[self.cell]) for mask in self._masks}
        self._block = None if not blocks else blocks.pop() if len(blocks) == 1 else (1, 1)
        self.path: str | None = None  # the only kernel to consider, on a GPU; set before the first plan
        self._plans: dict[tuple[int, torch.dtype], Plan] = {}
        self._inputs: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor | None, Tensor | None]] = {}
        self._kernels: dict[tuple, Any] = {}

    def is_current(self, tensors: dict[str, Tensor]) -> bool:
        """Whether the module's weights and masks are still these."""
        return tensors.keys() == self._seen.keys() and all(self._seen[name].is_now(x) for name, x in tensors.items())

    def plan(self, batch: int, dtype: torch.dtype) -> Plan:
        """How all layers and directions run; the one with the most weights left decides."""
        if (batch, dtype) not in self._plans:
            self._plans[batch, dtype] = self._make_plan(batch, dtype)
        return self._plans[batch, dtype]

    def run(
        self, x: Tensor, states: list[Tensor], segments: list[Segment], plan: Plan, dropout: float
    ) -> tuple[Tensor, list[Tensor]]:
        """All layers.

        Args:
            x: (rows, input_size), the inputs of all sequences at the first step, then at the second, and so on.
            states: h, and c of an LSTM, (layers * directions, B, H); empty for zeros.
            segments: how the rows are cut into steps; the number of sequences never rises.
            dropout: between layers.

        Returns the output, (rows, directions * H), and the last states.

        Raises FloatingPointError on the CPU if a hidden state is not finite: its kernels leave out the pruned
        weights, and zero times infinity is NaN.
        """
        last = []
        if not states and len(segments) > 1:  # some sequences join later
            zeros = x.new_zeros(len(self._names), segments[0][2], self.hidden_size)
            states = [zeros] * (2 if self.cell == "lstm" else 1)
        for first in range(0, len(self._names), self.directions):
            if first and dropout:
                x = F.dropout(x, dropout)
            outputs = []
            for index in range(first, first + self.directions):
                projected = self._project(x, index)
                kernel = self._kernel(index, projected.dtype, plan)
                output, state = _recur(kernel, projected, [s[index] for s in states], segments, index > first)
                outputs.append(output)
                last.append(state)
            x = outputs[0] if self.directions == 1 else torch.cat(outputs, 1)
        alone = len(last) == 1  # with nothing to copy
        return x, [s[0].unsqueeze(0) if alone else torch.stack(s) for s in zip(*last, strict=True)]

    def _make_plan(self, batch: int, dtype: torch.dtype) -> Plan:
        device = self.weights["weight_hh_l0"].device
        kept = max(int(mask.sum()) for mask in self._masks) if self._masks else None
        if device.type == "cuda":
            if reason := nvrtc.why_no_cuda():
                return no_kernel(reason)
            properties = torch.cuda.get_device_properties(device)
            layer = self.cell, self.hidden_size, batch, dtype, kept, self._block
            plan = _kernels_on(device).make_plan(*layer, properties, self.path)
            return plan if plan.path == "steps" else self._check_kernels(dtype, plan)
        if device.type == "cpu" and kept is not None and self._block is not None:
            return _kernels_on(device).make_plan(self.cell, self.hidden_size, dtype, kept, self._block)
        which = "dense layers" if device.type == "cpu" else f"layers on {device.type}"
        return no_kernel(f"{which} run in torch's own kernels")

    def _check_kernels(self, dtype: torch.dtype, plan: Plan) -> Plan:
        """The plan if all kernels can be made; only packing tells what fits, and only the device what it can hold."""
        try:
            for index in range(len(self._names)):
                self._kernel(index, dtype, plan)
        except (MemoryError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            return no_kernel(reason)._replace(bytes_available=plan.bytes_available)
        return plan

    def _input(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The input weights, all biases that are added to their product, and a GRU's other one, inside r * (...)."""
        name = self._names[index]
        if (name, dtype) not in self._inputs:
            weight = self.weights[name.replace("hh", "ih")].to(dtype)
            bias, inner = self.weights.get(name.replace("weight_hh", "bias_ih")), None
            if bias is not None:
                recurrent = self.weights[name.replace("weight", "bias")]
                if self.cell == "gru":
                    outer = 2 * self.hidden_size
                    inner = recurrent[outer:].to(dtype)
                    recurrent = F.pad(recurrent[:outer], (0, self.hidden_size))
                bias = (bias + recurrent).to(dtype)
            self._inputs[name, dtype] = weight, bias, inner
        return self._inputs[name, dtype]

    def _project(self, x: Tensor, index: int) -> Tensor:
        weight, bias, _ = self._input(index, x.dtype)
        return linear(x, weight, bias)

    def _kernel(self, index: int, dtype: torch.dtype, plan: Plan) -> Any:
        key = (index, dtype, plan, torch.backends.cuda.matmul.allow_tf32)
        if key not in self._kernels:
            weight, inner = self.weights[self._names[index]].to(dtype), self._input(index, dtype)[2]
            mask, kernels = self._masks[index] if self._masks else None, _kernels_on(weight.device)
            if weight.is_cuda:
                layer = kernels.PersistentLayer(self.cell, weight, inner, mask, self._block, plan)
                if not torch.cuda.is_current_stream_capturing():  # the next to use it may do so on another stream
                    torch.cuda.current_stream(weight.device).synchronize()
            else:
                layer = kernels.SparseLayer(self.cell, weight, inner, mask, self._block)
            self._kernels[key] = layer
        return self._kernels[key]


def _kernels_on(device: torch.device) -> Any:
    """The module with a device's kernels, imported when there is use for them."""
    return importlib.import_module(f"ostinato.kernels.persistent.{device.type}")


class _Seen:
    """What a tensor was, to tell whether it has changed.

    Keeping the tensor keeps its memory from being given to another one.  A tensor made in inference mode counts
    no changes and is compared with a copy.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.version = None if tensor.is_inference() else tensor._version
        self.tensor = tensor.clone() if self.version is None else tensor.detach()

    def is_now(self, tensor: Tensor) -> bool:
        if tensor.dtype != self.tensor.dtype or tensor.device != self.tensor.device:
            return False
        if self.version is None or tensor.is_inference():
            return torch.equal(tensor, self.tensor)
        return tensor.data_ptr() == self.tensor.data_ptr() and tensor._version == self.version


def tensors_of(module: nn.RNNBase) -> dict[str, Tensor]:
    """All that a module's result depends on: weights, biases and masks."""
    tensors = {name: getattr(module, name) for name in module._flat_weights_names}
    return tensors | {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


def _recur(
    kernel: Any, projected: Tensor, states: list[Tensor], segments: list[Segment], reverse: bool
) -> tuple[Tensor, list[Tensor]]:
    """One layer and direction; a sequence joins with its first step and keeps the state after its last."""
    states = [state.to(projected.dtype) for state in states]
    if len(segments) == 1:
        ((_, steps, batch),) = segments
        output, *last = kernel(projected.view(steps, batch, -1), *[*states, None, None][:2], reverse)
        return output.flatten(0, 1), [state for state in last if state is not None]

    states, outputs = [state.clone() for state in states], []
    for first, steps, batch in segments[::-1] if reverse else segments:
        rows = projected[first : first + steps * batch].view(steps, batch, -1)
        h, c = [*(state[:batch] for state in states), None][:2]
        output, *last = kernel(rows, h, c, reverse)
        for state, new in zip(states, last, strict=False):
            state[:batch] = new
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs[::-1] if reverse else outputs), states
