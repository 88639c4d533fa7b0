"""The workloads: random inputs, minimal work, hardware limit, and float64 reference of what is computed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

import ostinato
from ostinato.diagonal.hgrn import hgrn
from ostinato.diagonal.para import para_gru, para_lstm
from ostinato.diagonal.rg_lru import rg_lru
from ostinato.episodes import forward_by_episodes
from ostinato.kernels.gemm import linear
from ostinato.kernels.scan import reference
from ostinato.masks import block_name
from ostinato.minimal.recurrences import GATES, RECURRENCES

OURS = "Ostinato"


class Unavailable(Exception):
    """Raised with the reason why a contestant cannot run a workload on this machine."""


@dataclass(frozen=True)
class Run:
    """A prepared computation: what is timed, and how its tensors map to (B, T, channels)."""

    call: Callable[[], Tensor]  # the output
    inputs: tuple[Tensor, ...] = ()  # what gradients are taken of: the data, then parameters
    layout: Callable[[Tensor], Tensor] = lambda x: x  # from its own layout to (B, T, channels) and back
    has_bias: bool = False
    same_function: bool = True  # False for a layer that computes something else, such as nn.GRU
    plan: dict[str, Any] = field(default_factory=dict)  # how our own layer runs
    forward_only: str = ""  # why no other pass is measured
    gradients: Callable[[], tuple[Tensor, ...]] | None = (
        None  # the forward and backward pass, if not autograd's of call
    )
    weights: tuple[Tensor, ...] = ()  # which change between calls, as in training

    def prepare(self, pass_name: str) -> Callable[[], Any]:
        """The function to time; without inputs to differentiate, every pass is the call itself."""
        if pass_name == "forward+backward" and self.gradients is not None:
            return self.gradients
        if pass_name == "forward" or not self.inputs:
            return torch.no_grad()(self.call)
        if self.forward_only:
            raise Unavailable(self.forward_only)
        grad = torch.randn_like(self.call())
        if pass_name == "forward+backward":
            return lambda: torch.autograd.grad(self.call(), self.inputs, grad)
        output = self.call()
        return lambda: torch.autograd.grad(output, self.inputs, grad, retain_graph=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Change all weights, as an optimiser would, which invalidates all that was derived from them."""
        for weight in self.weights:
            weight.neg_()  # keeps their distribution


class MemoryBound:
    """Reads and writes tensors of (B, T, D) once each; the limit is the memory bandwidth that an addition reaches."""

    passes = ("forward", "backward")
    unit = "bytes"
    limit_name = "torch.add(out=)"
    channels: int
    dtype: torch.dtype

    @property
    def steps(self) -> int:
        """Time steps of all sequences."""
        raise NotImplementedError

    def tensors(self, pass_name: str) -> int:
        """The number of such tensors that a pass must read or write."""
        raise NotImplementedError

    def work(self, pass_name: str) -> int:
        """Bytes that must move."""
        return self.tensors(pass_name) * self.steps * self.channels * self.dtype.itemsize

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """The addition of two tensors of the same size, which moves three."""
        output = torch.empty_like(data[0])
        return Run(lambda: torch.add(data[0], data[1], out=output))

    def limit_share(self, pass_name: str) -> float:
        """The least time of the pass, as a multiple of the limit's."""
        return self.tensors(pass_name) / 3

    def window(self, x: Tensor, start: int, channels: list[int]) -> Tensor:
        """The part of an input, or of its gradient, that some channels of the last sequence depend on."""
        return x[-1:, start:][..., channels]


@dataclass(frozen=True)
class Scan(MemoryBound):
    """``h[t] = a[t] * h[t-1] + b[t]`` over (B, T, D)."""

    batch: int
    length: int
    channels: int
    dtype: torch.dtype = torch.float32
    who: tuple[str, ...] = ()  # the contestants' names; all usual ones if empty
    time_contiguous: bool = False  # (B, D, T) in memory
    shortest: int = 0  # steps of the shortest of sequences laid end to end, whose lengths are evenly spaced; 0 for none
    resets: float = 0.0  # share of the steps before which the state is zero

    kind = cell = "scan"
    inputs: ClassVar[tuple[str, ...]] = ("a", "b")

    def __str__(self) -> str:
        length = f"{self.shortest} to {self.length}" if self.shortest else f"{self.length}"
        more = ", time-contiguous" * self.time_contiguous + ", packed" * bool(self.shortest)
        more += f", {self.resets:.0%} resets" * bool(self.resets)
        return f"linear_scan ({self.batch}, {length}, {self.channels}) {name_of(self.dtype)}{more}"

    @cached_property
    def lengths(self) -> Tensor:
        """Steps of each sequence."""
        return torch.linspace(self.shortest or self.length, self.length, self.batch).round().int()

    @property
    def steps(self) -> int:
        return int(self.lengths.sum())

    def tensors(self, pass_name: str) -> int:
        """Forward a, b and h; backward a, h and three gradients."""
        return 3 if pass_name == "forward" else 5

    def cu_seqlens(self, device: torch.device) -> Tensor | None:
        """The boundaries of packed sequences; None without packing."""
        if not self.shortest:
            return None
        return F.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device)

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """a in (0, 1), b, normal, and resets, (B, T)."""
        batch, length = (1, self.steps) if self.shortest else (self.batch, self.length)
        shape = (batch, self.channels, length) if self.time_contiguous else (batch, length, self.channels)
        a = torch.rand(shape, device=device, dtype=self.dtype)
        b = torch.randn(shape, device=device, dtype=self.dtype)
        resets = [torch.rand(batch, length, device=device) < self.resets] if self.resets else []
        return (a.mT, b.mT, *resets) if self.time_contiguous else (a, b, *resets)

    def resets_of(self, data: tuple[Tensor, ...]) -> Tensor | None:
        """Before which steps of :meth:`data` the state is zero; None for none."""
        return data[2] if self.resets else None

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], _channels: list[int], _bias: bool) -> Tensor:
        (a, b), resets, starts = inputs, self.resets_of(data), self.cu_seqlens(inputs[0].device)
        begins = torch.zeros(1, data[0].shape[1], dtype=torch.bool) if resets is None else resets[-1:].cpu()
        if starts is not None:
            begins[0, starts[:-1].long()] = True
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]), resets=begins[:, -a.shape[1] :])[0]


@ostinato.recurrence
def invented(x: Tensor, r: Tensor, i: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """A recurrence that no library has, with as many tensors as RG-LRU."""
    a = torch.exp(-rate * F.softplus(r))
    return a, (1 - a) * torch.tanh(i) * x


EQUATIONS = {"RG-LRU": rg_lru, "HGRN": hgrn, "invented": invented}


@dataclass(frozen=True)
class Equation(MemoryBound):
    """A linear recurrence given by its equation, over (B, T, D)."""

    cell: str
    batch: int
    length: int
    channels: int
    dtype: torch.dtype = torch.float32
    who: tuple[str, ...] = ()

    kind = "recurrence"

    def __str__(self) -> str:
        return f"{self.cell} ({self.batch}, {self.length}, {self.channels}) {name_of(self.dtype)}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arguments (B, T, D), without the last, a parameter (D,)."""
        return EQUATIONS[self.cell].names[:-1]

    @property
    def steps(self) -> int:
        return self.batch * self.length

    def tensors(self, pass_name: str) -> int:
        """Forward inputs and h; backward both, the gradient in, and those of the inputs."""
        return (1 if pass_name == "forward" else 2) * (len(self.inputs) + 1)

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Pre-activations, normal, and a parameter in (0, 1), or, of RG-LRU, for decays in (0.3, 0.996) a step."""
        shape = self.batch, self.length, self.channels
        sequences = (torch.randn(shape, device=device, dtype=self.dtype) for _ in self.inputs)
        parameter = torch.rand(self.channels, device=device)
        return *sequences, (-1 - 5 * parameter if self.cell == "RG-LRU" else parameter)

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], channels: list[int], _bias: bool) -> Tensor:
        a, b = EQUATIONS[self.cell].function(*inputs, data[-1][channels].to(inputs[0]))
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]))[0]


@dataclass(frozen=True)
class Layer:
    """A layer of minGRU or minLSTM, whose limit is the GEMM of its pre-activations."""

    cell: str
    batch: int
    length: int
    input_size: int
    channels: int
    dtype: torch.dtype = torch.float32
    passes: tuple[str, ...] = ("forward", "forward+backward")
    who: tuple[str, ...] = ()

    kind = "layer"
    inputs: ClassVar[tuple[str, ...]] = ("input",)
    unit = "flops"
    limit_name = "its GEMM alone"

    def __str__(self) -> str:
        sizes = f"({self.batch}, {self.length}, {self.input_size}) to {self.channels}"
        return f"{self.cell} {sizes} {name_of(self.dtype)}"

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """x, the weight (gates * H, input_size) and the bias, all random."""
        rows = self.gates * self.channels
        x = torch.randn(self.batch, self.length, self.input_size, device=device, dtype=self.dtype)
        weight = torch.randn(rows, self.input_size, device=device, dtype=self.dtype) * self.input_size**-0.5
        return x, weight, torch.randn(rows, device=device, dtype=self.dtype)

    def work(self, pass_name: str) -> int:
        """Floating-point operations of the matrix products: one forward, two more backward."""
        products = 1 if pass_name == "forward" else 3
        rows = self.gates * self.channels
        return products * 2 * self.batch * self.length * self.input_size * rows

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """The same pass of the GEMM alone."""
        x, weight = (tensor.detach().requires_grad_() for tensor in data[:2])
        return Run(lambda: linear(x, weight), (x, weight))

    def limit_share(self, _pass_name: str) -> float:
        return 1.0

    def window(self, x: Tensor, start: int, _channels: list[int]) -> Tensor:
        return x[-1:, start:]

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], channels: list[int], bias: bool) -> Tensor:
        gates, x = GATES[self.cell], inputs[0]
        weight, offset = (part.unflatten(0, (gates, -1))[:, channels].flatten(0, 1).to(x) for part in data[1:])
        pre = F.linear(x, weight)
        # Rounded to the layer's dtype, as the layer stores them: the derivative of the candidate jumps at 0.
        pre = pre + (pre.to(self.dtype).to(pre) - pre).detach()
        function = RECURRENCES[self.cell]["positive"].function
        a, b = function(*(pre + offset if bias else pre).chunk(gates, -1))
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]))[0]


@dataclass(frozen=True)
class ParaLayer(Layer):
    """A layer of ParaGRU or ParaLSTM, with a GEMM in tf32."""

    kind = "recurrence"
    tf32: ClassVar[bool] = True
    gates: ClassVar[int] = 3

    def __str__(self) -> str:
        return f"{self.cell} ({self.batch}, {self.length}, {self.input_size}) to {self.channels} tf32"

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """As a layer's, and the diagonal recurrent weights of each gate, and of an LSTM's peepholes."""
        vectors = 3 if self.cell == "ParaGRU" else 5
        recurrent = torch.randn(vectors, self.channels, device=device) * self.channels**-0.5
        return *super().data(device), *recurrent

    def layer(self, data: tuple[Tensor, ...]) -> Any:
        """Our layer."""
        x, weight, bias, *recurrent = data
        layer = getattr(ostinato, self.cell)(self.input_size, self.channels, batch_first=True, device=x.device)
        weights = {"weight_ih_l0": weight, "bias_ih_l0": bias, "weight_hh_l0": torch.cat(recurrent[:3])}
        if self.cell == "ParaLSTM":
            weights["weight_ch_l0"] = torch.cat(recurrent[3:])
        layer.load_state_dict(weights)
        return layer

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], channels: list[int], _bias: bool) -> Tensor:
        x = inputs[0]
        weight, bias = (part.unflatten(0, (3, -1))[:, channels].flatten(0, 1).to(x) for part in data[1:3])
        recurrent = [part[channels].to(x) for part in data[3:]]
        function = para_gru if self.cell == "ParaGRU" else para_lstm
        h, _ = function(*F.linear(x, weight).chunk(3, -1), *recurrent, *bias.chunk(3), backend="cpu")
        return h if self.cell == "ParaGRU" else h[0]


RECURRENT = {"RNN": (ostinato.RNN, nn.RNN), "GRU": (ostinato.GRU, nn.GRU), "LSTM": (ostinato.LSTM, nn.LSTM)}


@dataclass(frozen=True)
class Recurrence:
    """Stacked RNNs, GRUs or LSTMs over (T, B, H), with as many inputs as hidden units, with or without gradients.

    Gradients are those of the input, the initial states and all parameters, given those of the output and last states.
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
    network: str = ""  # whose layers these are
    resets: float = 0.0  # share of the steps with which an episode begins

    unit = "steps"
    limit_name = "hardly any recurrent weights"

    def __str__(self) -> str:
        pruned = "dense" if self.density == 1 else f"{self.density:.0%} {block_name(self.block)}"
        dtype = "tf32" if self.tf32 else name_of(self.dtype)
        first = f"{self.cell} {self.hidden} B{self.batch} T{self.length} {pruned} {dtype}"
        more = [f"{self.layers} layers"] * (self.layers > 1) + ["bidirectional"] * self.bidirectional
        more += [f"packed {self.shortest}-{self.length}"] * bool(self.shortest)
        more += [f"{self.resets:.0%} resets"] * bool(self.resets)
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
        """Whether it is one layer and direction, without packing and resets."""
        return (self.layers, self.bidirectional, self.shortest, self.resets) == (1, False, 0, 0.0)

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
        names = [f"{part}_{end}" for end in suffixes for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
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
        """x, the initial states, gradients of the output and of the last states, resets, and parameters and masks."""
        sizes = self.batch_sizes
        steps = (self.length, self.batch) if sizes is None else (int(sizes.sum()),)
        states = [(self.layers * self.directions, self.batch, self.hidden)] * self.states
        grads = [(*steps, self.directions * self.hidden), *states] if self.trained else []
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
        """Our layer."""
        layer = self._make(RECURRENT[self.cell][0], data[0].device, self.dtype)
        layer.load_state_dict(self.state_dict(data))
        return layer

    def torch_layer(self, data: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
        """``torch.nn``'s, with the same weights, zeros included, in one contiguous buffer for cuDNN."""
        layer = self._make(RECURRENT[self.cell][1], data[0].device, dtype)
        layer.load_state_dict(self.state_dict(data), strict=False)
        return layer

    def _make(self, layer_type: Any, device: torch.device, dtype: torch.dtype) -> Any:
        stack = {"num_layers": self.layers, "bidirectional": self.bidirectional}
        return layer_type(self.hidden, self.hidden, **stack, device=device, dtype=dtype)

    def apply(self, layer: Any, x: Tensor, *states: Tensor, **resets: Any) -> tuple[Tensor, ...]:
        """The output, packed or padded as x, and the last states, of a layer with ``torch.nn``'s interface."""
        sizes, lstm = self.batch_sizes, self.cell == "LSTM"
        output, last = layer(x if sizes is None else PackedSequence(x, sizes), states if lstm else states[0], **resets)
        return output if sizes is None else output.data, *(last if lstm else (last,))

    def apply_torch(self, layer: Any, data: tuple[Tensor, ...], x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """As :meth:`apply` for one of ``torch.nn``'s layers, which runs each episode separately if there are resets."""
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
        """The run of a function from x and the initial states to the output and last states, and of its weights."""
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
        """Our own layer with one weight left per row: the input's GEMM, the exchange of states, and the gates."""
        layer = self.layer(data)
        ostinato.prune(layer, 1 / self.hidden, block=self.block)
        return Run(lambda: layer(data[0])[0])

    def limit_share(self, _pass_name: str) -> float:
        return 1.0


Training = partial(Recurrence, passes=("forward+backward",))
Workload = Scan | Layer | Equation | Recurrence  # and ParaLayer, which is a Layer


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
