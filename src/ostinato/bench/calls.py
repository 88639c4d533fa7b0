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
from ostinato.bench.shapes import random_size
from ostinato.cuda_graphs.capture import capture
from ostinato.states import each

CALLS, ROUNDS = 50, 20  # calls per sample, fewer than fill a GPU's queue; samples, interleaved over contestants
SAMPLE = 0.03  # seconds, for which fewer calls are enough
DRAWN = 24  # calls of random sizes
UNIT = "torch.add(out=)"

Call = Callable[[], Any]


def calls(device: torch.device, rounds: int = ROUNDS) -> Iterator[Record]:
    """One record per kind of call, with the seconds of each contestant, Ostinato first."""
    torch.manual_seed(0)
    x, y, out = (torch.randn(2, 16, 64, device=device) for _ in range(3))
    unit: dict[str, Call] = {UNIT: partial(torch.add, x, y, out=out)}
    for name, contestants in itertools.chain(*(kind(device) for kind in KINDS)):
        seconds = _seconds(contestants | unit, device, rounds)
        rows = {who: {"seconds": value, "times_unit": value / seconds[UNIT]} for who, value in seconds.items()}
        yield {"workload": {"kind": "calls", "name": name}, "contestants": rows}


def _seconds(contestants: dict[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """The time to issue a call: the minimum over interleaved rounds, as noise on the host only adds to it."""
    wait = torch.get_device_module(device).synchronize
    samples: dict[str, list[float]] = {who: [] for who in contestants}
    count = {}
    for who, call in contestants.items():
        for _ in range(3):
            wait()
            start = time.perf_counter()
            call()
        count[who] = max(1, min(CALLS, int(SAMPLE / (time.perf_counter() - start))))
    for _ in range(rounds):
        for who, call in contestants.items():
            wait()
            start = time.perf_counter()
            for _ in range(count[who]):
                call()
            samples[who].append((time.perf_counter() - start) / count[who])
    wait()
    return {who: min(times) for who, times in samples.items()}


def _scans(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    for shape in ((1, 1, 1), (1, 1, 8), (1, 4, 8), (2, 16, 64)):
        a, b = torch.rand(shape, device=device), torch.randn(shape, device=device)
        leaves = [x.clone().requires_grad_() for x in (a, b)]

        def loop(a: Tensor = a, b: Tensor = b) -> Tensor:
            h, states = torch.zeros_like(a[:, 0]), []
            for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
                h = torch.addcmul(b_t, a_t, h)
                states.append(h)
            return torch.stack(states, 1)

        def both(leaves: list[Tensor] = leaves, grad: Tensor = b) -> Any:
            return torch.autograd.grad(ostinato.linear_scan(*leaves)[0], leaves, grad)

        contestants: dict[str, Call] = {
            "Ostinato": partial(ostinato.linear_scan, a, b),
            "Ostinato, with gradient": partial(ostinato.linear_scan, *leaves),
            "Ostinato, forward+backward": both,
            "loop of PyTorch operations": loop,
        }
        yield f"linear_scan {shape}", contestants


PEERS: dict[str, tuple[Any, Any, Any]] = {
    "GRU": (ostinato.GRU, nn.GRU, nn.GRUCell),
    "LSTM": (ostinato.LSTM, nn.LSTM, nn.LSTMCell),
}
DIAGONAL: tuple[type[Any], ...] = (ostinato.MinGRU, *(getattr(diagonal, name) for name in diagonal.__all__))


def _steps(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    without_gradient = torch.no_grad()
    for hidden, batch in ((32, 1), (128, 1), (512, 1), (128, 32)):
        x = torch.randn(batch, hidden, device=device)
        for name, (ours, *peers) in {"MinGRU": (ostinato.MinGRU, *PEERS["GRU"][1:]), **PEERS}.items():
            own, layer, cell = (kind(hidden, hidden, device=device) for kind in (ours, *peers))
            state = without_gradient(own.step)(x)[1]
            given = tuple(h[0] for h in state) if isinstance(state, tuple) else state[0]
            contestants: dict[str, Call] = {
                "Ostinato": partial(own.step, x, state),
                "Ostinato, T = 1": partial(own, x[None]),
                "Ostinato, Stepper": partial(ostinato.Stepper(own, batch_size=batch), x),
                "torch.nn, T = 1": partial(layer, x[None]),
                "torch.nn's cell": partial(cell, x, given),
            }
            title = f"step of {name} {hidden}{f', B = {batch}' * (batch > 1)}"
            yield title, {who: without_gradient(call) for who, call in contestants.items()}


def _diagonal(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Steps of two diagonal layers, beside two of torch.nn's GRU."""
    x, without_gradient = torch.randn(1, 256, device=device), torch.no_grad()
    peer = nn.GRU(256, 256, 2, device=device)
    for kind in DIAGONAL:
        layers: Any = kind(256, 256, 2, device=device)
        state = without_gradient(layers.step)(x)[1]
        contestants: dict[str, Call] = {
            "Ostinato": partial(layers.step, x, state),
            "Ostinato, frozen Stepper": partial(ostinato.Stepper(layers, batch_size=1, frozen=True), x),
            "torch.nn's GRU, T = 1": partial(peer, x[None], torch.zeros(2, 1, 256, device=device)),
        }
        title = f"2 layers of {kind.__name__} 256"
        yield title, {who: without_gradient(call) for who, call in contestants.items()}


def _trained(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    for (name, kinds), batch, given in itertools.product(PEERS.items(), (1, 32), (False, True)):
        x, h = torch.randn(2, 1, batch, 256, device=device)
        states = ((h, h.clone()) if name == "LSTM" else h,) if given else ()
        contestants: dict[str, Call] = {}
        for who, kind in zip(("Ostinato", "torch.nn"), kinds, strict=False):
            layer = kind(256, 256, device=device)
            run = partial(layer, x, *states)
            contestants |= {who: run, f"{who}, forward+backward": _with_gradients(run, layer, h)}
        cell = kinds[2](256, 256, device=device)
        run = partial(cell, x[0], *(each(itemgetter(0), state) for state in states))
        contestants |= {"torch.nn's cell, forward+backward": _with_gradients(run, cell, h[0])}
        yield f"{name} 256 with gradient, T = 1, B = {batch}{', given a state' * given}", contestants


def _with_gradients(run: Call, module: nn.Module, grad: Tensor) -> Call:
    """The gradients of the parameters, given that of the first of the results."""
    parameters = list(module.parameters())

    def both() -> Any:
        result = run()
        return torch.autograd.grad(result if isinstance(result, Tensor) else result[0], parameters, grad)

    return both


def _loops(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Gradients through 32 steps, each of which takes what the one before gave, as a decoder's do."""

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

    for (name, kinds), batch in itertools.product(PEERS.items(), (1, 32)):
        x, grad = torch.randn(2, batch, 256, device=device)
        layer, peer, cell = (kind(256, 256, device=device) for kind in kinds)
        contestants: dict[str, Call] = {
            "Ostinato": _with_gradients(partial(loop, layer.step, x), layer, grad),
            "torch.nn": _with_gradients(partial(loop, peer, x[None]), peer, grad[None]),
            "torch.nn's cell": _with_gradients(partial(loop_of_cells, cell, x), cell, grad),
        }
        awaited = {who: _awaited(call, device) for who, call in contestants.items()}
        yield f"loop of 32 steps of {name} 256, trained, B = {batch}", awaited


def _short(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Short sequences, without gradients and trained: called, compiled, and from a CUDA graph; a GPU is awaited."""
    shapes = ("GRU", 128, 16, 32, 0.0), ("LSTM", 256, 64, 16, 0.0), ("LSTM", 256, 64, 16, 0.2)
    for (name, hidden, steps, batch, dropout), trained in itertools.product(shapes, (False, True)):
        options: dict[str, Any] = {"num_layers": 2, "dropout": dropout} if dropout else {}
        x, grad = torch.randn(2, steps, batch, hidden, device=device)
        contestants: dict[str, Call] = {}
        with torch._dynamo.config.patch(allow_rnn=True):  # as compiled calls ask for it, also while they are timed
            for who, kind in zip(("Ostinato", "torch.nn"), PEERS[name], strict=False):
                make = partial(kind, hidden, hidden, **options, device=device)
                for how, call in _ways(make, x, grad if trained else None):
                    contestants[who + how] = _awaited(call, device)
            what = "training of" if trained else "inference of"
            layers = ", 2 layers, dropout" if dropout else ""
            yield f"{what} {name} {hidden}, T = {steps}, B = {batch}{layers}", contestants


def _short_diagonal(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Short sequences through other layers, beside torch.nn's GRU."""
    x, grad = torch.randn(2, 64, 16, 128, device=device)
    for kind, trained in itertools.product(DIAGONAL, (False, True)):
        contestants: dict[str, Call] = {}
        layers: dict[str, nn.Module] = {"Ostinato": kind(128, 128, device=device)}
        layers["torch.nn's GRU"] = nn.GRU(128, 128, device=device)
        for who, layer in layers.items():
            contestants[who] = _awaited(_called(layer, x, grad if trained else None), device)
        yield f"sequences of {kind.__name__} 128, T = 64, B = 16{', trained' * trained}", contestants


def _drawn(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """Short sequences through layers of random sizes."""
    draw, kinds = random.Random(0), {"RNN": (ostinato.RNN, nn.RNN), **PEERS}
    size = partial(random_size, draw)
    for i in range(DRAWN):
        name, trained, layers = draw.choice([*kinds]), i % 2 == 1, draw.choice((1, 1, 2))
        hidden, steps, batch = 8 * size(2, 48), size(2, 64), size(1, 64)
        dtype = draw.choice((torch.float32, torch.float16, torch.bfloat16)) if device.type == "cuda" else torch.float32
        x, grad = torch.randn(2, steps, batch, hidden, device=device, dtype=dtype)
        contestants = {}
        for who, kind in zip(("Ostinato", "torch.nn"), kinds[name], strict=False):
            layer = kind(hidden, hidden, layers, device=device, dtype=dtype)
            contestants[who] = _awaited(_called(layer, x, grad if trained else None), device)
        of_call = ", 2 layers" * (layers - 1) + ", trained" * trained
        yield f"drawn {name} {hidden} {str(dtype)[6:]}, T = {steps}, B = {batch}{of_call}", contestants


def _ways(make: Callable[[], nn.Module], x: Tensor, grad: Tensor | None) -> Iterator[tuple[str, Call]]:
    """How a new layer is called, and the call."""
    yield "", _called(make(), x, grad)
    if not x.is_cuda:
        return
    layer = make()
    if grad is not None:
        torch.cuda.make_graphed_callables(layer, (x,))
        yield ", in a CUDA graph", _called(layer, x, grad)
    else:
        yield ", in a CUDA graph", capture(_called(layer, x, grad), x.device)[0]
    layer = make()
    if type(layer) not in (ostinato.GRU, ostinato.LSTM):  # torch.nn's are compiled step by step, for a minute
        return
    layer.compile(mode="reduce-overhead")
    yield ", compiled", _called(layer, x, grad)


def _called(layer: nn.Module, x: Tensor, grad: Tensor | None) -> Call:
    """A call with the gradients of the parameters, given that of the output; without any if none is given."""
    run = partial(layer, x)
    return torch.no_grad()(run) if grad is None else _with_gradients(run, layer, grad)


def _awaited(call: Call, device: torch.device) -> Call:
    """The call until its device has finished."""
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
    awaited = {who: _awaited(call, device) for who, call in contestants.items()}
    yield "Stepper of GRU 256, 2 layers, awaited", awaited


KINDS = _scans, _steps, _diagonal, _trained, _loops, _short, _short_diagonal, _drawn, _stacks
