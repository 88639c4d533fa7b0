"""RNN, GRU and LSTM, dense and pruned, in inference and training."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import ostinato
from ostinato.bench.workloads.run import Run, name_of
from ostinato.episodes import forward_by_episodes
from ostinato.masks import block_name
from ostinato.recurrent.torch_layers import flatten_weights

RECURRENT = {"RNN": (ostinato.RNN, nn.RNN), "GRU": (ostinato.GRU, nn.GRU), "LSTM": (ostinato.LSTM, nn.LSTM)}


@dataclass(frozen=True)
class RecurrentLayer:
    """A stack of RNN, GRU or LSTM layers over (T, B, H), with as many inputs as hidden units, trained or not.

    Gradients are those of the input, the initial states and all parameters, given those of the output and final states.
    """

    cell: str
    hidden: int
    batch: int = 1
    length: int = 256
    density: float = 1.0
    block: tuple[int, int] = (1, 1)
    dtype: torch.dtype = torch.float16
    tf32: bool = False  # whether float32 products may be rounded to tf32, ours and the peers'
    passes: tuple[str, ...] = ("forward",)
    who: tuple[str, ...] = ()
    layers: int = 1
    bidirectional: bool = False
    shortest: int = 0  # steps of the shortest of packed sequences, whose lengths are evenly spaced; 0 packs none
    network: str = ""  # the published network that has these layers
    resets: float = 0.0  # share of the steps that begin an episode
    projection: int = 0  # the size to which an LSTM's h is projected; 0: it is not

    unit = "steps"
    limit_name = "hardly any recurrent weights"

    def __str__(self) -> str:
        pruned = "dense" if self.density == 1 else f"{self.density:.0%} {block_name(self.block)}"
        dtype = "tf32" if self.tf32 else name_of(self.dtype)
        first = f"{self.cell} {self.hidden} B{self.batch} T{self.length} {pruned} {dtype}"
        more = [f"{self.layers} layers"] * (self.layers > 1) + ["bidirectional"] * self.bidirectional
        more += [f"packed {self.shortest}-{self.length}"] * bool(self.shortest)
        more += [f"{self.resets:.0%} resets"] * bool(self.resets)
        more += [f"projected to {self.projection}"] * bool(self.projection)
        return f"{self.network}: " * bool(self.network) + ", ".join((first, *more))

    @property
    def kind(self) -> str:
        return "training" if self.trained else "persistent"

    @property
    def trained(self) -> bool:
        """Whether gradients are computed."""
        return self.passes != ("forward",)

    @property
    def is_plain(self) -> bool:
        """Whether this is one layer and direction, without packing, resets or projection."""
        return (self.layers, self.bidirectional, self.shortest, self.resets, self.projection) == (1, False, 0, 0.0, 0)

    @property
    def gates(self) -> int:
        return {"RNN": 1, "GRU": 3, "LSTM": 4}[self.cell]

    @property
    def states(self) -> int:
        """The number of states: h, and an LSTM's c."""
        return 2 if self.cell == "LSTM" else 1

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def names(self) -> list[str]:
        """The names of the parameters, and of the masks if pruned."""
        suffixes = [f"l{k}{end}" for k in range(self.layers) for end in ("", "_reverse")[: self.directions]]
        parts = "weight_ih", "weight_hh", "bias_ih", "bias_hh", *(["weight_hr"] if self.projection else [])
        names = [f"{part}_{end}" for end in suffixes for part in parts]
        return names + [f"mask_hh_{end}" for end in suffixes if self.density != 1]

    @property
    def differentiable(self) -> list[str]:
        """The names of all tensors with a gradient, in the order of :meth:`run`."""
        parameters = [name for name in self.names if not name.startswith("mask")]
        return ["input", *("h0", "c0")[: self.states], *parameters]

    @cached_property
    def batch_sizes(self) -> Tensor | None:
        """The number of sequences at each step, if they are packed."""
        if not self.shortest:
            return None
        lengths = torch.linspace(self.length, self.shortest, self.batch).round()
        return (lengths > torch.arange(self.length)[:, None]).sum(1)

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Draw x, the initial states, gradients of the output and final states, resets, and parameters and masks."""
        sizes = self.batch_sizes
        steps = (self.length, self.batch) if sizes is None else (int(sizes.sum()),)
        output = self.projection or self.hidden
        states = [(self.layers * self.directions, self.batch, size) for size in (output, self.hidden)[: self.states]]
        grads = [(*steps, self.directions * output), *states] if self.trained else []
        shapes = (*steps, self.hidden), *states, *grads
        inputs = (torch.randn(shape, device=device, dtype=self.dtype) for shape in shapes)
        resets = [torch.rand(steps, device=device) < self.resets] if self.resets else []
        layer = self._make(RECURRENT[self.cell][0], device, torch.float32)
        if self.density != 1:
            ostinato.prune(layer, self.density, block=self.block)
        parts = layer.state_dict()
        weights = (parts[name] if name.startswith("mask") else parts[name].to(self.dtype) for name in self.names)
        return *inputs, *resets, *weights

    def state_dict(self, data: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The layer's state dict, from :meth:`data`."""
        return dict(zip(self.names, data[-len(self.names) :], strict=True))

    def resets_of(self, data: tuple[Tensor, ...]) -> Tensor | None:
        """The reset mask of :meth:`data`, (T, B); None without resets."""
        return data[-len(self.names) - 1] if self.resets else None

    def layer(self, data: tuple[Tensor, ...]) -> Any:
        """Make our layer with the weights of :meth:`data`."""
        layer = self._make(RECURRENT[self.cell][0], data[0].device, self.dtype)
        layer.load_state_dict(self.state_dict(data))
        return layer

    def torch_layer(self, data: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
        """Make ``torch.nn``'s layer with the same weights, pruned ones as zeros, in one contiguous buffer for cuDNN."""
        layer = self._make(RECURRENT[self.cell][1], data[0].device, dtype)
        layer.load_state_dict(self.state_dict(data), strict=False)
        flatten_weights(layer)
        return layer

    def _make(self, layer_type: Any, device: torch.device, dtype: torch.dtype) -> Any:
        stack: dict[str, Any] = {"num_layers": self.layers, "bidirectional": self.bidirectional}
        if self.projection:
            stack["proj_size"] = self.projection
        return layer_type(self.hidden, self.hidden, **stack, device=device, dtype=dtype)

    def apply(self, layer: Any, x: Tensor, *states: Tensor, **resets: Any) -> tuple[Tensor, ...]:
        """Return the output, packed or padded like x, and the final states of a layer with ``torch.nn``'s interface."""
        sizes, lstm = self.batch_sizes, self.cell == "LSTM"
        output, last = layer(x if sizes is None else PackedSequence(x, sizes), states if lstm else states[0], **resets)
        return output if sizes is None else output.data, *(last if lstm else (last,))

    def apply_torch(self, layer: Any, data: tuple[Tensor, ...], x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Apply one of ``torch.nn``'s layers like :meth:`apply`, to each episode separately if there are resets."""
        resets, lstm = self.resets_of(data), self.cell == "LSTM"
        if resets is None:
            return self.apply(layer, x, *states)

        def forward(packed: PackedSequence, states: list[Tensor]) -> tuple[PackedSequence, list[Tensor]]:
            output, last = layer(packed, tuple(states) if lstm else states[0])
            return output, list(last) if lstm else [last]

        sizes = torch.full((self.length,), self.batch)
        output, last = forward_by_episodes(
            forward, x.flatten(0, 1), list(states), sizes, resets.flatten(), self.directions
        )
        return output.unflatten(0, (self.length, self.batch)), *last

    def run(self, call: Callable[..., tuple[Tensor, ...]], data: tuple[Tensor, ...], weights: Iterable[Tensor]) -> Run:
        """Prepare a function of x and the initial states that returns the output and final states, and its weights."""
        count, weights = self.states, tuple(weights)
        inputs = tuple(tensor.detach().requires_grad_(self.trained) for tensor in data[: 1 + count])
        grads = data[1 + count : 2 + 2 * count]

        def gradients() -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(*inputs), (*inputs, *weights), grads)

        return Run(lambda: call(*inputs)[0], inputs, gradients=gradients if self.trained else None, weights=weights)

    def work(self, _pass_name: str) -> int:
        """Time steps."""
        return self.length

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """Our layer with one recurrent weight kept per row: the input's GEMM, the exchange of states, and the gates."""
        layer = self.layer(data)
        ostinato.prune(layer, 1 / self.hidden, block=self.block)
        return Run(lambda: layer(data[0])[0])

    def limit_share(self, _pass_name: str) -> float:
        return 1.0


Training = partial(RecurrentLayer, passes=("forward+backward",))
