"""What is computed: shapes, random inputs, the least work it takes, and its float64 reference."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

import ostinato
from ostinato import diagonal
from ostinato.episodes import forward_by_episodes
from ostinato.kernels.gemm import linear
from ostinato.kernels.scan import reference
from ostinato.masks import block_name
from ostinato.minimal import GATES, RECURRENCES

OURS = "Ostinato"


class Unavailable(Exception):
    """Why a contestant cannot run on this machine, or not this workload."""


@dataclass(frozen=True)
class Run:
    """A computation made ready: what is timed, and how its tensors map to (B, T, channels)."""

    call: Callable[[], Tensor]  # the output
    inputs: tuple[Tensor, ...] = ()  # what gradients are taken of: the data, then parameters
    layout: Callable[[Tensor], Tensor] = lambda x: x  # from its own layout to (B, T, channels) and back
    has_bias: bool = False
    same_function: bool = True  # False for a layer that computes something else, such as nn.GRU
    plan: dict[str, Any] = field(default_factory=dict)  # how our own layer runs
    forward_only: str = ""  # why no other pass is measured
    gradients: Callable[[], tuple[Tensor, ...]] | None = None  # a forward and backward pass of its own
    weights: tuple[Tensor, ...] = ()  # what an optimiser would change between two calls

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
        """Change all weights, as an optimiser would: nothing that was made from them may serve the next call."""
        for weight in self.weights:
            weight.neg_()  # random weights stay as random, and as large


@dataclass(frozen=True)
class Scan:
    """``h[t] = a[t] * h[t-1] + b[t]`` over (B, T, D), bounded by the memory's speed."""

    batch: int
    length: int
    channels: int
    dtype: torch.dtype = torch.float32
    who: tuple[str, ...] = ()  # the contestants' names; all usual ones if empty
    time_contiguous: bool = False  # (B, D, T) in memory
    shortest: int = 0  # steps of the shortest of sequences laid end to end, whose lengths are evenly spaced; 0 for none

    kind = cell = "scan"
    inputs: ClassVar[tuple[str, ...]] = ("a", "b")
    passes = ("forward", "backward")
    unit = "bytes"
    limit_name = "torch.add(out=)"

    def __str__(self) -> str:
        length = f"{self.shortest} to {self.length}" if self.shortest else f"{self.length}"
        layout = ", time-contiguous" * self.time_contiguous + ", packed" * bool(self.shortest)
        return f"linear_scan ({self.batch}, {length}, {self.channels}) {name_of(self.dtype)}{layout}"

    @cached_property
    def lengths(self) -> Tensor:
        """Steps of each sequence."""
        return torch.linspace(self.shortest or self.length, self.length, self.batch).round().int()

    def cu_seqlens(self, device: torch.device) -> Tensor | None:
        """Where packed sequences begin, and the last ends."""
        if not self.shortest:
            return None
        return F.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device)

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """a in (0, 1) and b, normal."""
        batch, length = (1, int(self.lengths.sum())) if self.shortest else (self.batch, self.length)
        shape = (batch, self.channels, length) if self.time_contiguous else (batch, length, self.channels)
        a = torch.rand(shape, device=device, dtype=self.dtype)
        b = torch.randn(shape, device=device, dtype=self.dtype)
        return (a.mT, b.mT) if self.time_contiguous else (a, b)

    def work(self, pass_name: str) -> int:
        """Bytes that must move: forward a, b and h; backward a, h and the gradient in, two gradients out."""
        tensors = 3 if pass_name == "forward" else 5
        return tensors * int(self.lengths.sum()) * self.channels * self.dtype.itemsize

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """The addition of two tensors of the same size, which moves three."""
        output = torch.empty_like(data[0])
        return Run(lambda: torch.add(*data, out=output))

    def limit_share(self, pass_name: str) -> float:
        """How many times the limit's time the pass takes at least."""
        return self.work(pass_name) / self.work("forward")

    def window(self, x: Tensor, start: int, channels: list[int]) -> Tensor:
        """The part of an input, or of its gradient, that some channels of the last sequence depend on."""
        return x[-1:, start:][..., channels]

    def reference(self, inputs: list[Tensor], _data: tuple[Tensor, ...], _channels: list[int], _bias: bool) -> Tensor:
        a, b = inputs
        begins, starts = torch.zeros(1, int(self.lengths.sum()), dtype=torch.bool), self.cu_seqlens(a.device)
        if starts is not None:
            begins[0, starts[:-1].long()] = True
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]), resets=begins[:, -a.shape[1] :])[0]


@dataclass(frozen=True)
class Layer:
    """One layer of minGRU or minLSTM, bounded by the matrix product that makes its pre-activations."""

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
        """The same pass of the matrix product and nothing else."""
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
        # Pre-activations are stored in the layer's dtype; g's derivative jumps at 0, which they must not cross here.
        pre = pre + (pre.to(self.dtype).to(pre) - pre).detach()
        function = RECURRENCES[self.cell]["positive"].function
        a, b = function(*(pre + offset if bias else pre).chunk(gates, -1))
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]))[0]


@ostinato.recurrence
def invented(x: Tensor, r: Tensor, i: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """One that no library has, of as many tensors as RG-LRU."""
    a = torch.exp(-rate * F.softplus(r))
    return a, (1 - a) * torch.tanh(i) * x


EQUATIONS = {"RG-LRU": diagonal.rg_lru, "HGRN": diagonal.hgrn, "invented": invented}


@dataclass(frozen=True)
class Equation:
    """A recurrence made of its equation, over (B, T, D), bounded by the memory's speed."""

    cell: str
    batch: int
    length: int
    channels: int
    dtype: torch.dtype = torch.float32
    who: tuple[str, ...] = ()

    kind = "recurrence"
    passes = ("forward", "backward")
    unit = "bytes"
    limit_name = Scan.limit_name

    def __str__(self) -> str:
        return f"{self.cell} ({self.batch}, {self.length}, {self.channels}) {name_of(self.dtype)}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arguments of (B, T, D); that of the channels comes after them."""
        return EQUATIONS[self.cell].names[:-1]

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Pre-activations, normal, and a parameter in (0, 1), or, of RG-LRU, for decays in (0.3, 0.996) a step."""
        shape = self.batch, self.length, self.channels
        sequences = (torch.randn(shape, device=device, dtype=self.dtype) for _ in self.inputs)
        parameter = torch.rand(self.channels, device=device)
        return *sequences, (-1 - 5 * parameter if self.cell == "RG-LRU" else parameter)

    def work(self, pass_name: str) -> int:
        """Bytes that must move: forward inputs and h; backward both, the gradient in, and those of the inputs."""
        tensors = len(self.inputs) + 1 if pass_name == "forward" else 2 * len(self.inputs) + 2
        return tensors * self.batch * self.length * self.channels * self.dtype.itemsize

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """The addition of two tensors of the same size, which moves three."""
        output = torch.empty_like(data[0])
        return Run(lambda: torch.add(data[0], data[1], out=output))

    def limit_share(self, pass_name: str) -> float:
        tensors = len(self.inputs) + 1 if pass_name == "forward" else 2 * len(self.inputs) + 2
        return tensors / 3

    def window(self, x: Tensor, start: int, channels: list[int]) -> Tensor:
        return x[-1:, start:][..., channels]

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], channels: list[int], _bias: bool) -> Tensor:
        a, b = EQUATIONS[self.cell].function(*inputs, data[-1][channels].to(inputs[0]))
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]))[0]


@dataclass(frozen=True)
class Product(Layer):
    """One ParaGRU or ParaLSTM with the product that makes its pre-activations, rounded to tf32."""

    kind = "recurrence"
    tf32: ClassVar[bool] = True
    gates: ClassVar[int] = 3

    def __str__(self) -> str:
        return f"{self.cell} ({self.batch}, {self.length}, {self.input_size}) to {self.channels} tf32"

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """And the weights of the state: of each gate, and of an LSTM's peepholes."""
        vectors = 3 if self.cell == "ParaGRU" else 5
        recurrent = torch.randn(vectors, self.channels, device=device) * self.channels**-0.5
        return *super().data(device), *recurrent

    def layer(self, data: tuple[Tensor, ...]) -> Any:
        """Ours."""
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
        function = diagonal.para_gru if self.cell == "ParaGRU" else diagonal.para_lstm
        h, _ = function(*F.linear(x, weight, bias).chunk(3, -1), *recurrent, backend="cpu")
        return h if self.cell == "ParaGRU" else h[0]


RECURRENT = {"RNN": (ostinato.RNN, nn.RNN), "GRU": (ostinato.GRU, nn.GRU), "LSTM": (ostinato.LSTM, nn.LSTM)}


@dataclass(frozen=True)
class Recurrence:
    """One RNN, GRU or LSTM without gradient over (T, B, H), its input as wide as its state."""

    cell: str
    hidden: int
    batch: int = 1
    length: int = 256
    density: float = 1.0
    block: tuple[int, int] = (1, 1)
    dtype: torch.dtype = torch.float16
    tf32: bool = False  # whether float32 may be rounded to it, by us and by the peers
    passes: tuple[str, ...] = ("forward",)
    who: tuple[str, ...] = ()

    kind = "persistent"
    unit = "steps"
    limit_name = "hardly any recurrent weights"

    def __str__(self) -> str:
        pruned = "dense" if self.density == 1 else f"{self.density:.0%} {block_name(self.block)}"
        dtype = "tf32" if self.tf32 else name_of(self.dtype)
        return f"{self.cell} {self.hidden} B{self.batch} T{self.length} {pruned} {dtype}"

    @property
    def gates(self) -> int:
        return {"RNN": 1, "GRU": 3, "LSTM": 4}[self.cell]

    @property
    def names(self) -> list[str]:
        """Of the parameters, and of the masks if pruned."""
        parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [f"{part}_l0" for part in (*parts, *["mask_hh"] * (self.density != 1))]

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """x and the weights, biases and, if pruned, mask of :meth:`state_dict`, all random."""
        x = torch.randn(self.length, self.batch, self.hidden, device=device, dtype=self.dtype)
        return x, *self._parameters(device)

    def _parameters(self, device: torch.device) -> list[Tensor]:
        layer = self._make(RECURRENT[self.cell][0], device, torch.float32)
        if self.density != 1:
            ostinato.prune(layer, self.density, block=self.block)
        parts = layer.state_dict()
        return [parts[name] if name.startswith("mask") else parts[name].to(self.dtype) for name in self.names]

    def _make(self, layer_type: Any, device: torch.device, dtype: torch.dtype) -> Any:
        return layer_type(self.hidden, self.hidden, device=device, dtype=dtype)

    def state_dict(self, data: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Of the layer of :meth:`data`."""
        return dict(zip(self.names, data[-len(self.names) :], strict=True))

    def layer(self, data: tuple[Tensor, ...]) -> Any:
        """Ours."""
        layer = self._make(RECURRENT[self.cell][0], data[0].device, self.dtype)
        layer.load_state_dict(self.state_dict(data))
        return layer

    def torch_layer(self, data: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
        """``torch.nn``'s, with the same weights, zeros included; on the GPU side by side in memory, as cuDNN wants."""
        layer = self._make(RECURRENT[self.cell][1], data[0].device, dtype)
        layer.load_state_dict(self.state_dict(data), strict=False)
        return layer

    def work(self, _pass_name: str) -> int:
        """Time steps."""
        return self.length

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """Our own layer with one weight a row left: the input's product, the exchange of states, the gates."""
        layer = self.layer(data)
        ostinato.prune(layer, 1 / self.hidden, block=self.block)
        x = data[0]
        return Run(lambda: layer(x)[0])

    def limit_share(self, _pass_name: str) -> float:
        return 1.0


@dataclass(frozen=True)
class Training(Recurrence):
    """The same with gradients, stacked layers, both directions and packed sequences.

    They are the gradients of the input, of the initial states and of all parameters, through the output and the last
    states.
    """

    passes: tuple[str, ...] = ("forward+backward",)
    layers: int = 1
    bidirectional: bool = False
    shortest: int = 0  # steps of the shortest of packed sequences, whose lengths are evenly spaced; 0 packs none
    network: str = ""  # whose layers these are
    resets: float = 0.0  # share of the steps with which an episode begins

    kind = "training"

    def __str__(self) -> str:
        more = [f"{self.layers} layers"] * (self.layers > 1) + ["bidirectional"] * self.bidirectional
        more += [f"packed {self.shortest}-{self.length}"] * bool(self.shortest)
        more += [f"{self.resets:.0%} resets"] * bool(self.resets)
        return f"{self.network}: " * bool(self.network) + ", ".join((super().__str__(), *more))

    @property
    def is_plain(self) -> bool:
        """One layer and direction, no packing, no episodes that end."""
        return (self.layers, self.bidirectional, self.shortest, self.resets) == (1, False, 0, 0.0)

    @property
    def states(self) -> int:
        """h, and c of an LSTM."""
        return 2 if self.cell == "LSTM" else 1

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def names(self) -> list[str]:
        suffixes = [f"l{k}{end}" for k in range(self.layers) for end in ("", "_reverse")[: self.directions]]
        names = [f"{part}_{end}" for end in suffixes for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        return names + [f"mask_hh_{end}" for end in suffixes if self.density != 1]

    @property
    def differentiable(self) -> list[str]:
        """What gradients are taken of, in the order of :meth:`run`."""
        parameters = [name for name in self.names if not name.startswith("mask")]
        return ["input", *("h0", "c0")[: self.states], *parameters]

    @cached_property
    def batch_sizes(self) -> Tensor | None:
        """How many sequences reach each step, if they are packed."""
        if not self.shortest:
            return None
        lengths = torch.linspace(self.length, self.shortest, self.batch).round()
        return (lengths > torch.arange(self.length)[:, None]).sum(1)

    def _make(self, layer_type: Any, device: torch.device, dtype: torch.dtype) -> Any:
        stack = {"num_layers": self.layers, "bidirectional": self.bidirectional}
        return layer_type(self.hidden, self.hidden, **stack, device=device, dtype=dtype)

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """x, the initial states, gradients of the output and of the last states, resets, and parameters and masks."""
        sizes = self.batch_sizes
        steps = (self.length, self.batch) if sizes is None else (int(sizes.sum()),)
        state = self.layers * self.directions, self.batch, self.hidden
        of_states = [state] * (2 * self.states)
        shapes = [(*steps, self.hidden), *of_states]
        shapes.insert(1 + self.states, (*steps, self.directions * self.hidden))
        inputs = (torch.randn(shape, device=device, dtype=self.dtype) for shape in shapes)
        resets = [torch.rand(steps, device=device) < self.resets] if self.resets else []
        return *inputs, *resets, *self._parameters(device)

    def resets_of(self, data: tuple[Tensor, ...]) -> Tensor | None:
        """Before which steps of :meth:`data` the state is zero, (T, B); None for none."""
        return data[2 + 2 * self.states] if self.resets else None

    def apply(self, layer: Any, x: Tensor, *states: Tensor, **resets: Any) -> tuple[Tensor, ...]:
        """The output, packed or padded as x, and the last states, of a layer with ``torch.nn``'s interface."""
        sizes, lstm = self.batch_sizes, self.cell == "LSTM"
        output, last = layer(x if sizes is None else PackedSequence(x, sizes), states if lstm else states[0], **resets)
        return output if sizes is None else output.data, *(last if lstm else (last,))

    def apply_torch(self, layer: Any, data: tuple[Tensor, ...], x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """As :meth:`apply`, of one of ``torch.nn``'s, which is given the episodes by themselves where some end."""
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
        """Of a function from x and the initial states to the output and the last ones, and its weights."""
        count, weights = self.states, tuple(weights)
        inputs = tuple(tensor.detach().requires_grad_() for tensor in data[: 1 + count])
        grads = data[1 + count : 2 + 2 * count]

        def gradients() -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(*inputs), (*inputs, *weights), grads)

        return Run(lambda: call(*inputs)[0], inputs, gradients=gradients, weights=weights)


Workload = Scan | Layer | Equation | Recurrence  # and Product, which is a Layer, and Training, a Recurrence


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def workloads(kind: str, device: torch.device, quick: bool = False, only: str = "") -> list[Workload]:
    """The shapes measured on a kind of device; `quick` is the part that ends within a minute.

    Raises ValueError if no name contains `only`.
    """
    works = (QUICK if quick else ON_CUDA if device.type == "cuda" else ON_CPU)[kind]
    chosen = [work for work in works if only in str(work)]
    if not chosen:
        raise ValueError(f"only must be part of one of {'; '.join(map(str, works))}; got {only!r}")
    return chosen


f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
CELLS = tuple(RECURRENT)
EAGER = (OURS, "minGRU-pytorch", "minGRU-pytorch, autocast", "torch.nn.GRU")
LSTMS = (OURS, *(f"minLSTM-pytorch{how}" for how in ("", ", autocast", ", compiled, autocast")), "torch.nn.LSTM")
SCANS = (OURS, "accelerated-scan warp", "accelerated-scan Triton", "torch associative_scan")
PLAIN = (OURS, "torch.nn")
CUDNN = (*PLAIN, "torch.nn in a CUDA graph")
GRAPHS = (*CUDNN, "GEMMs in a CUDA graph")
TRAINED = (*CUDNN, "Ostinato in a CUDA graph")
EPISODES = (*PLAIN, "Ostinato in a CUDA graph")  # to cut sequences the host must know where they end
KERNELS = ("Ostinato, dense kernel", "Ostinato, sparse kernel", "Ostinato, block kernel")
SPARSE = (*GRAPHS, "cuSPARSE")


def networks(dtype: torch.dtype, who: tuple[str, ...], *names: str) -> list[Workload]:
    """The recurrent layers of published networks, dense and pruned: the larger ones serve batches, the others a stream.

    GNMT's decoder (arXiv 1609.08144), Deep Speech 2 in the size of Baidu's DeepBench, the encoder of a streaming RNN-T
    without its projections (1811.06621), WaveRNN (1802.08435), the largest layer of LPCNet (1810.11846) and the
    GRUs of RNNoise (1709.08243) in its second version.
    """
    stacks = {
        "GNMT": ("LSTM", 1024, 8, 50, 8),
        "Deep Speech 2": ("GRU", 2560, 4, 500, 1),
        "RNN-T": ("LSTM", 2048, 1, 200, 8),
        "WaveRNN": ("GRU", 896, 1, 1000, 1),
        "LPCNet": ("GRU", 384, 1, 1000, 1),
        "RNNoise": ("GRU", 256, 1, 1000, 3),
    }
    return [
        replace(
            Training(cell, hidden, batch, length, density, block, dtype, who=who),
            passes=("forward",),
            layers=layers,
            network=name,
        )
        for name, (cell, hidden, batch, length, layers) in stacks.items()
        for density, block in ((1.0, (1, 1)), (0.1, (16, 1)))
        if name in names or not names
    ]


QUICK: dict[str, list[Workload]] = {
    "scan": [Scan(1, 4096, 256)],
    "layer": [Layer("mingru", 1, 1024, 256, 256), Layer("minlstm", 1, 1024, 256, 256)],
    "recurrence": [*(Equation(cell, 1, 1024, 256) for cell in EQUATIONS), Product("ParaGRU", 1, 1024, 64, 64)],
    "persistent": [
        Recurrence("GRU", 384, length=1000, density=0.1, block=(16, 1), dtype=f32, who=PLAIN),
        Recurrence("LSTM", 384, length=1000, density=0.1, block=(16, 1), dtype=f32, who=PLAIN),
    ],
    "training": [
        *(Training(cell, 256, 1, 200, dtype=f32, who=TRAINED) for cell in ("GRU", "LSTM")),
        Training("LSTM", 64, 4, 50, dtype=f32, layers=2, bidirectional=True, shortest=10, who=TRAINED),
    ],
    "networks": networks(f32, PLAIN, "LPCNet"),
    "training-sweep": [
        Training("GRU", hidden, batch, 50, dtype=f32, who=TRAINED) for hidden in (64, 128) for batch in (1, 4)
    ],
}
ON_CPU: dict[str, list[Workload]] = {
    "scan": [Scan(16, 4096, 256), Scan(1, 65536, 256)],
    "layer": [
        Layer("mingru", 1, 256, 256, 256),
        Layer("mingru", 1, 4096, 256, 256),
        Layer("mingru", 1, 16384, 256, 256),
        Layer("mingru", 16, 512, 256, 256),
        Layer("minlstm", 1, 4096, 256, 256),
    ],
    "recurrence": [Equation(cell, 1, 4096, 256) for cell in EQUATIONS],
    "persistent": [
        *(
            Recurrence(cell, hidden, length=1000, density=0.1, block=(16, 1), dtype=f32, who=PLAIN)
            for cell in CELLS
            for hidden in (384, 1024)
        ),
        Recurrence("GRU", 384, length=1000, density=0.3, block=(16, 1), dtype=f32, who=PLAIN),
        Recurrence("GRU", 384, length=1000, density=0.1, block=(8, 4), dtype=f32, who=PLAIN),
        Recurrence("GRU", 384, length=1000, density=0.1, dtype=f32, who=PLAIN),
        Recurrence("GRU", 384, batch=16, length=200, density=0.1, block=(16, 1), dtype=f32, who=PLAIN),
        Recurrence("LSTM", 384, batch=16, length=200, density=0.1, block=(16, 1), dtype=f32, who=PLAIN),
        Recurrence("GRU", 384, length=1, density=0.1, block=(16, 1), dtype=f32, who=PLAIN),
    ],
    "training": [
        *(
            Training(cell, 256, batch, length, dtype=f32, who=PLAIN)
            for cell in CELLS
            for batch, length in ((1, 1000), (16, 200))
        ),
        Training("GRU", 256, 1, 1000, density=0.1, block=(16, 1), dtype=f32, who=PLAIN),
        # Dense layers without gradient, over hidden size.
        *(
            Training(cell, hidden, batch, length, dtype=f32, passes=("forward",), who=PLAIN)
            for cell in CELLS
            for hidden in (64, 128, 256, 512, 1024)
            for batch, length in ((1, 1000), (16, 200))
        ),
    ],
    "networks": networks(f32, PLAIN, "GNMT", "WaveRNN", "LPCNet", "RNNoise"),
    "training-sweep": [
        Training(cell, hidden, batch, 100, dtype=f32, who=PLAIN)
        for cell in CELLS
        for hidden in (64, 128, 256, 512)
        for batch in (1, 4, 16)
    ],
}
TRAINED_LAYERS = [
    Training("GRU", 1024, 16, 512, dtype=bf16, who=TRAINED),
    Training("LSTM", 1024, 16, 512, dtype=bf16, who=TRAINED),
    Training("LSTM", 768, 16, 512, dtype=f16, who=TRAINED),
    Training("GRU", 2048, 8, 512, dtype=f16, who=TRAINED),
    Training("LSTM", 512, 64, 512, dtype=bf16, who=TRAINED),
    Training("LSTM", 256, 64, 512, dtype=f32, tf32=True, who=TRAINED),
    Training("GRU", 512, 256, 128, dtype=f32, tf32=True, who=TRAINED),
    Training("GRU", 128, 64, 512, dtype=f32, tf32=True, who=TRAINED),
    Training("GRU", 2304, 4, 512, density=0.1, block=(16, 1), dtype=f16, who=TRAINED),
    Training("LSTM", 512, 32, 512, dtype=bf16, layers=2, bidirectional=True, shortest=50, who=TRAINED),
]
WITH_EPISODES = [
    Training("GRU", 512, 256, 128, dtype=bf16, resets=0.03, who=EPISODES),
    Training("GRU", 512, 256, 128, dtype=bf16, who=TRAINED),
    # What resets cost, beside the same without.
    *(
        replace(work, resets=0.03, who=EPISODES)
        for work in TRAINED_LAYERS
        if work.is_plain and work.density == 1 and work.batch < 256
    ),
    Training("GRU", 512, 256, 128, dtype=f32, tf32=True, resets=0.03, who=(*EPISODES, "torchrl")),
]
ON_CUDA: dict[str, list[Workload]] = {
    "scan": [
        Scan(8, 4096, 1536),
        Scan(8, 4096, 1536, bf16),
        Scan(8, 65536, 1536, who=SCANS),
        Scan(8, 65536, 1536, bf16, who=SCANS),
        Scan(1, 65536, 256, who=SCANS),
        Scan(1, 2**20, 64, who=SCANS),
        Scan(1, 2**24, 1, who=SCANS),
        # Other shapes and layouts, which the peers have not.
        *(Scan(*sizes, dtype, who=(OURS,)) for sizes in ((2, 100000, 384), (128, 512, 256)) for dtype in (f32, bf16)),
        *(Scan(3, 5000, 1000, dtype, who=(OURS,)) for dtype in (f32, bf16)),
        *(Scan(*sizes, who=(OURS,)) for sizes in ((4, 2**20, 8), (1, 3_000_000, 7), (1, 2**18, 16))),
        Scan(8, 2048, 255, bf16, who=(OURS,)),
        *(Scan(8, 4096, 1536, dtype, who=(OURS,), time_contiguous=True) for dtype in (f32, bf16)),
        *(Scan(1000, 400, 512, dtype, who=(OURS,), shortest=1) for dtype in (f32, bf16)),
    ],
    "layer": [
        Layer("mingru", 16, 4096, 1024, 1024, bf16),
        Layer("minlstm", 16, 4096, 1024, 1024, bf16, who=LSTMS),
        Layer("mingru", 16, 4096, 1024, 1024, who=(*EAGER, "minGRU-pytorch, compiled")),
        Layer("mingru", 64, 512, 512, 512, bf16, who=EAGER),
        Layer("mingru", 1, 65536, 256, 256, bf16, who=EAGER),
        Layer("mingru", 64, 1000, 10, 100, who=EAGER),
        Layer("mingru", 64, 512, 256, 256, who=EAGER),
        Layer("mingru", 64, 4096, 256, 256, who=EAGER),
        Layer("mingru", 256, 128, 256, 256, bf16, who=EAGER),
        Layer("mingru", 4, 8192, 4096, 4096, bf16, who=EAGER),
        # The same work at every length: the time should not depend on how it is split into sequences.
        *(Layer("mingru", 65536 // t, t, 1024, 1024, bf16, who=(OURS,)) for t in (256, 1024, 16384, 65536)),
    ],
    "recurrence": [
        *(Equation(cell, 8, 4096, 1536, dtype) for dtype in (bf16, f32) for cell in EQUATIONS),
        *(
            Product(cell, *sizes)
            for cell in ("ParaGRU", "ParaLSTM")
            for sizes in ((8, 4096, 1024, 1024), (1, 65536, 1024, 1024), (64, 512, 512, 512))
        ),
    ],
    "persistent": [
        *(Recurrence(cell, 2304, 4, density=0.3, who=SPARSE + KERNELS) for cell in CELLS),
        *(Recurrence(cell, 2304, 4, density=0.1, who=SPARSE + KERNELS) for cell in CELLS),
        *(Recurrence(cell, 2304, 4, density=0.1, block=(16, 1), who=SPARSE + KERNELS) for cell in CELLS),
        *(Recurrence(cell, 2304, 4, density=0.1, block=(8, 4), who=SPARSE + KERNELS) for cell in CELLS),
        *(Recurrence(cell, 1024, 16, dtype=bf16, who=GRAPHS) for cell in CELLS),
        Recurrence("LSTM", 768, 16, who=GRAPHS),
        *(Recurrence("RNN", 8192, 4, density=0.1, block=block, who=SPARSE + KERNELS) for block in ((1, 1), (16, 1))),
        *(Recurrence("LSTM", 4608, 4, density=0.1, block=block, who=SPARSE + KERNELS) for block in ((1, 1), (16, 1))),
        # Over hidden size and batch: dense where it can fit, pruned beyond.
        *(
            Recurrence(cell, hidden, batch, who=GRAPHS)
            for cell in CELLS
            for hidden in (256, 768, 1024, 2304)
            for batch in (1, 4, 16)
            if (cell, hidden, batch) != ("LSTM", 768, 16)
        ),
        *(
            Recurrence(cell, hidden, batch, density=0.1, block=(16, 1), who=CUDNN)
            for cell in CELLS
            for hidden in (4608, 8192)
            for batch in (1, 4, 16)
            if (cell, hidden, batch) not in (("RNN", 8192, 4), ("LSTM", 4608, 4))
        ),
        # float32 exact and rounded to tf32; then errors over more steps.
        *(
            Recurrence(cell, hidden, batch, dtype=f32, tf32=tf32, who=GRAPHS)
            for cell in CELLS
            for hidden, batch in ((1024, 16), (2304, 4))
            for tf32 in (False, True)
        ),
        *(Recurrence("LSTM", 1024, 16, 2000, dtype=dtype, who=PLAIN) for dtype in (f32, f16, bf16)),
        Recurrence("LSTM", 1024, 16, 2000, dtype=f32, tf32=True, who=PLAIN),
        Recurrence("GRU", 1024, 16, 2000, dtype=bf16, who=PLAIN),
        *(
            Recurrence("LSTM", 2304, 4, 2000, density, block, who=PLAIN)
            for density, block in ((0.3, (1, 1)), (0.1, (16, 1)))
        ),
    ],
    "training": [
        *TRAINED_LAYERS,
        # Errors over more steps.
        *(replace(work, length=2000, who=PLAIN) for work in TRAINED_LAYERS if work.length == 512 and not work.shortest),
        *WITH_EPISODES,
    ],
    "networks": networks(f16, CUDNN),
    "training-sweep": [
        Training(cell, hidden, batch, 256, dtype=dtype, tf32=dtype == f32, who=TRAINED)
        for cell, dtype in (("GRU", bf16), ("GRU", f32), ("LSTM", bf16), ("LSTM", f32), ("LSTM", f16))
        for hidden in (128, 256, 512, 1024, 2048)
        for batch in (1, 4, 16, 64)
    ],
}
