"""The host overhead of small calls: short scans, single steps, and training on short sequences."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

import ostinato
from ostinato import diagonal
from ostinato.bench.measure import Record
from ostinato.bench.peers.prepare import linear_loop
from ostinato.bench.shapes import random_size
from ostinato.cuda_graphs.capture import capture
from ostinato.states import each

CALLS = 50  # per sample, too few to fill a GPU's launch queue
ROUNDS = 20  # samples of each contestant, interleaved with the others'
SAMPLE_SECONDS = 0.03  # a sample of slow calls takes fewer of them, about this long
RANDOM_LAYERS = 24
UNIT = "torch.add(out=)"  # the call whose time every other is stated in

Call = Callable[[], Any]


def calls(device: torch.device, rounds: int = ROUNDS) -> Iterator[Record]:
    """Yield one record per kind of call, with the seconds of each contestant, Ostinato first."""
    torch.manual_seed(0)
    x, y, out = (torch.randn(2, 16, 64, device=device) for _ in range(3))
    unit: dict[str, Call] = {UNIT: partial(torch.add, x, y, out=out)}
    for name, contestants in itertools.chain(*(kind(device) for kind in KINDS)):
        seconds = _seconds(contestants | unit, device, rounds)
        rows = {who: {"seconds": value, "times_unit": value / seconds[UNIT]} for who, value in seconds.items()}
        yield {"workload": {"kind": "calls", "name": name}, "contestants": rows}


def _seconds(contestants: dict[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """The time to issue a call: the minimum over interleaved rounds, as noise on the host only adds to it."""
    synchronize = torch.get_device_module(device).synchronize
    samples: dict[str, list[float]] = {who: [] for who in contestants}
    count = {}
    for who, call in contestants.items():
        for _ in range(3):
            synchronize()
            start = time.perf_counter()
            call()
        count[who] = max(1, min(CALLS, int(SAMPLE_SECONDS / (time.perf_counter() - start))))
    for _ in range(rounds):
        for who, call in contestants.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(count[who]):
                call()
            samples[who].append((time.perf_counter() - start) / count[who])
    synchronize()
    return {who: min(times) for who, times in samples.items()}


def _scans(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    for shape in ((1, 1, 1), (1, 1, 8), (1, 4, 8), (2, 16, 64)):
        a, b = torch.rand(shape, device=device), torch.randn(shape, device=device)
        leaves = [x.clone().requires_grad_() for x in (a, b)]

        def loop(a: Tensor = a, b: Tensor = b) -> Tensor:
            return linear_loop(a, b, torch.zeros_like(a[:, 0]), 1)

        def forward_backward(leaves: list[Tensor] = leaves, grad: Tensor = b) -> Any:
            return torch.autograd.grad(ostinato.linear_scan(*leaves)[0], leaves, grad)

        contestants: dict[str, Call] = {
            "Ostinato": partial(ostinato.linear_scan, a, b),
            "Ostinato, with gradient": partial(ostinato.linear_scan, *leaves),
            "Ostinato, forward+backward": forward_backward,
            "loop of PyTorch operations": loop,
        }
        yield f"linear_scan {shape}", contestants


PEERS: dict[str, tuple[Any, Any, Any]] = {  # our layer, torch.nn's layer and its cell
    "GRU": (ostinato.GRU, nn.GRU, nn.GRUCell),
    "LSTM": (ostinato.LSTM, nn.LSTM, nn.LSTMCell),
}
DIAGONAL: tuple[type[Any], ...] = (ostinato.MinGRU, *(getattr(diagonal, name) for name in diagonal.__all__))


def _steps(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    without_gradient = torch.no_grad()
    for hidden, batch in ((32, 1), (128, 1), (512, 1), (128, 32)):
        x = torch.randn(batch, hidden, device=device)
        for name, types in {"MinGRU": (ostinato.MinGRU, *PEERS["GRU"][1:]), **PEERS}.items():
            ours, layer, cell = (layer_type(hidden, hidden, device=device) for layer_type in types)
            state = without_gradient(ours.step)(x)[1]
            cell_state = tuple(h[0] for h in state) if isinstance(state, tuple) else state[0]
            contestants: dict[str, Call] = {
                "Ostinato": partial(ours.step, x, state),
                "Ostinato, T = 1": partial(ours, x[None]),
                "Ostinato, Stepper": partial(ostinato.Stepper(ours, batch_size=batch), x),
                "torch.nn, T = 1": partial(layer, x[None]),
                "torch.nn's cell": partial(cell, x, cell_state),
            }
            title = f"step of {name} {hidden}{f', B = {batch}' * (batch > 1)}"
            yield title, {who: without_gradient(call) for who, call in contestants.items()}


def _diagonal(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Single steps of two stacked layers with a diagonal recurrence, beside a 2-layer GRU of torch.nn."""
    x, without_gradient = torch.randn(1, 256, device=device), torch.no_grad()
    peer = nn.GRU(256, 256, 2, device=device)
    for layer_type in DIAGONAL:
        layers: Any = layer_type(256, 256, 2, device=device)
        state = without_gradient(layers.step)(x)[1]
        contestants: dict[str, Call] = {
            "Ostinato": partial(layers.step, x, state),
            "Ostinato, frozen Stepper": partial(ostinato.Stepper(layers, batch_size=1, frozen=True), x),
            "torch.nn's GRU, T = 1": partial(peer, x[None], torch.zeros(2, 1, 256, device=device)),
        }
        title = f"2 layers of {layer_type.__name__} 256"
        yield title, {who: without_gradient(call) for who, call in contestants.items()}


def _trained(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    for (name, types), batch, with_state in itertools.product(PEERS.items(), (1, 32), (False, True)):
        x, h = torch.randn(2, 1, batch, 256, device=device)
        states = ((h, h.clone()) if name == "LSTM" else h,) if with_state else ()
        contestants: dict[str, Call] = {}
        for who, layer_type in zip(("Ostinato", "torch.nn"), types, strict=False):
            layer = layer_type(256, 256, device=device)
            run = partial(layer, x, *states)
            contestants |= {who: run, f"{who}, forward+backward": _with_gradients(run, layer, h)}
        cell = types[2](256, 256, device=device)
        run = partial(cell, x[0], *(each(itemgetter(0), state) for state in states))
        contestants |= {"torch.nn's cell, forward+backward": _with_gradients(run, cell, h[0])}
        yield f"{name} 256 with gradient, T = 1, B = {batch}{', given a state' * with_state}", contestants


def _with_gradients(run: Call, module: nn.Module, grad: Tensor) -> Call:
    """Return a call that runs forward and backward to the parameters, `grad` being the gradient of the first result."""
    parameters = list(module.parameters())

    def forward_backward() -> Any:
        result = run()
        return torch.autograd.grad(result if isinstance(result, Tensor) else result[0], parameters, grad)

    return forward_backward


def _loops(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Training through a loop of 32 steps whose input is the output of the step before, as in a decoder."""

    def loop(step: Callable[[Tensor, Any], tuple[Tensor, Any]], x: Tensor) -> Tensor:
        state = None
        for _ in range(32):
            x, state = step(x, state)
        return x

    def loop_of_cells(cell: nn.Module, x: Tensor) -> Tensor:
        state = None
        for _ in range(32):
            state = cell(x, state)
            x = state if isinstance(state, Tensor) else state[0]
        return x

    for (name, types), batch in itertools.product(PEERS.items(), (1, 32)):
        x, grad = torch.randn(2, batch, 256, device=device)
        layer, peer, cell = (layer_type(256, 256, device=device) for layer_type in types)
        contestants: dict[str, Call] = {
            "Ostinato": _with_gradients(partial(loop, layer.step, x), layer, grad),
            "torch.nn": _with_gradients(partial(loop, peer, x[None]), peer, grad[None]),
            "torch.nn's cell": _with_gradients(partial(loop_of_cells, cell, x), cell, grad),
        }
        synchronized = {who: _synchronized(call, device) for who, call in contestants.items()}
        yield f"loop of 32 steps of {name} 256, trained, B = {batch}", synchronized


def _short(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Inference and training on short sequences: called directly, compiled, and replayed from a CUDA graph.

    Unlike the host's time of single calls, these times include the wait for the GPU.
    """
    shapes = ("GRU", 128, 16, 32, 0.0), ("LSTM", 256, 64, 16, 0.0), ("LSTM", 256, 64, 16, 0.2)
    for (name, hidden, steps, batch, dropout), trained in itertools.product(shapes, (False, True)):
        options: dict[str, Any] = {"num_layers": 2, "dropout": dropout} if dropout else {}
        x, grad = torch.randn(2, steps, batch, hidden, device=device)
        contestants: dict[str, Call] = {}
        with torch._dynamo.config.patch(allow_rnn=True):  # read at every compiled call, also while it is timed
            for who, layer_type in zip(("Ostinato", "torch.nn"), PEERS[name], strict=False):
                make = partial(layer_type, hidden, hidden, **options, device=device)
                for suffix, call in _call_variants(make, x, grad if trained else None):
                    contestants[who + suffix] = _synchronized(call, device)
            what = "training of" if trained else "inference of"
            layers = ", 2 layers, dropout" if dropout else ""
            yield f"{what} {name} {hidden}, T = {steps}, B = {batch}{layers}", contestants


def _short_diagonal(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Short sequences through the layers with a diagonal recurrence, beside torch.nn's GRU."""
    x, grad = torch.randn(2, 64, 16, 128, device=device)
    for layer_type, trained in itertools.product(DIAGONAL, (False, True)):
        contestants: dict[str, Call] = {}
        layers: dict[str, nn.Module] = {"Ostinato": layer_type(128, 128, device=device)}
        layers["torch.nn's GRU"] = nn.GRU(128, 128, device=device)
        for who, layer in layers.items():
            contestants[who] = _synchronized(_call(layer, x, grad if trained else None), device)
        yield f"sequences of {layer_type.__name__} 128, T = 64, B = 16{', trained' * trained}", contestants


def _random_sizes(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Short sequences through layers of random sizes."""
    draw, types = random.Random(0), {"RNN": (ostinato.RNN, nn.RNN), **PEERS}
    size = partial(random_size, draw)
    for i in range(RANDOM_LAYERS):
        name, trained, layers = draw.choice([*types]), i % 2 == 1, draw.choice((1, 1, 2))
        hidden, steps, batch = 8 * size(2, 48), size(2, 64), size(1, 64)
        dtype = draw.choice((torch.float32, torch.float16, torch.bfloat16)) if device.type == "cuda" else torch.float32
        x, grad = torch.randn(2, steps, batch, hidden, device=device, dtype=dtype)
        contestants = {}
        for who, layer_type in zip(("Ostinato", "torch.nn"), types[name], strict=False):
            layer = layer_type(hidden, hidden, layers, device=device, dtype=dtype)
            contestants[who] = _synchronized(_call(layer, x, grad if trained else None), device)
        suffix = ", 2 layers" * (layers - 1) + ", trained" * trained
        yield f"drawn {name} {hidden} {str(dtype)[6:]}, T = {steps}, B = {batch}{suffix}", contestants


def _call_variants(make: Callable[[], nn.Module], x: Tensor, grad: Tensor | None) -> Iterator[tuple[str, Call]]:
    """Yield each way to call a newly made layer: the suffix of its label, and the call."""
    yield "", _call(make(), x, grad)
    if not x.is_cuda:
        return
    layer = make()
    if grad is not None:
        torch.cuda.make_graphed_callables(layer, (x,))
        yield ", in a CUDA graph", _call(layer, x, grad)
    else:
        yield ", in a CUDA graph", capture(_call(layer, x, grad), x.device)[0]
    layer = make()
    if type(layer) not in (ostinato.GRU, ostinato.LSTM):  # torch.nn's are compiled step by step, for a minute
        return
    layer.compile(mode="reduce-overhead")
    yield ", compiled", _call(layer, x, grad)


def _call(layer: nn.Module, x: Tensor, grad: Tensor | None) -> Call:
    """Return a call of the layer: forward and backward from the output's gradient, or without one, inference."""
    run = partial(layer, x)
    return torch.no_grad()(run) if grad is None else _with_gradients(run, layer, grad)


def _synchronized(call: Call, device: torch.device) -> Call:
    """Return a call that also waits until the device has finished."""
    wait: Call = torch.cuda.synchronize
    return call if device.type == "cpu" else lambda: (call(), wait())


def _stacks(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    x = torch.randn(1, 256, device=device)
    ours, layer = (kind(256, 256, 2, device=device) for kind in PEERS["GRU"][:2])
    contestants: dict[str, Call] = {
        "Ostinato": partial(ostinato.Stepper(ours, batch_size=1), x),
        "torch.nn": torch.no_grad()(partial(layer, x[None])),
    }
    yield "Stepper of GRU 256, 2 layers", contestants
    synchronized = {who: _synchronized(call, device) for who, call in contestants.items()}
    yield "Stepper of GRU 256, 2 layers, awaited", synchronized


KINDS = _scans, _steps, _diagonal, _trained, _loops, _short, _short_diagonal, _random_sizes, _stacks
