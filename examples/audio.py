"""Streaming audio on one core: a network of RNNoise's shape, pruned like RNNoise, processes frame after frame.

Its input is the bands of a frame of 10 ms, its output gains for 32 bands: two convolutions, three GRUs of 256 units,
and a layer over all of them (Valin 2018, arXiv 1709.08243, in the shape of the second version).  Weights are random:
the example is about time.
"""

import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ostinato

BANDS, GAINS, SIZE = 65, 32, 256
FRAME = 0.01  # seconds
DENSITIES = {"r": 0.3, "z": 0.2, "n": 0.5}  # of a GRU's gates, in blocks of 8 by 4, besides the recurrent diagonal


class Denoiser(nn.Module):
    """Computes gains (B, GAINS) from bands (B, BANDS), one frame at a time."""

    def __init__(self, gru: type[nn.GRU]) -> None:
        super().__init__()
        # Convolutions over three frames, the last two of which are part of the state.
        self.conv1 = nn.Linear(3 * BANDS, 128)
        self.conv2 = nn.Linear(3 * 128, SIZE)
        self.gru = gru(SIZE, SIZE, num_layers=3)
        self.gains = nn.Linear(4 * SIZE, GAINS)

    def initial_state(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        zeros = torch.zeros
        return zeros(batch_size, 2 * BANDS), zeros(batch_size, 2 * 128), zeros(3, batch_size, SIZE)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        last1, last2, h = state
        x = torch.cat([last1, x], 1)
        y = torch.cat([last2, torch.tanh(self.conv1(x))], 1)
        z = torch.tanh(self.conv2(y))
        if isinstance(self.gru, ostinato.GRU):
            _, h = self.gru.step(z, h)
        else:
            _, h = self.gru(z[None], h)
        gains = torch.sigmoid(self.gains(torch.cat([z, *h], 1)))  # of all three layers
        return gains, (x[:, BANDS:], y[:, 128:], h)


def prune(model: Denoiser) -> Denoiser:
    """Prune most of the GRUs' recurrent and input weights: here at once, by magnitude; in RNNoise, during training."""
    pruned = copy.deepcopy(model)
    ostinato.prune(pruned, DENSITIES, block=(8, 4), keep_diagonal=True, input_weights=True)
    return pruned


def zeros_as_masks(model: Denoiser) -> Denoiser:
    """Copy a model without its masks, as one pruned by another tool would come, and derive them from its zeros."""
    other = Denoiser(ostinato.GRU)
    other.load_state_dict({name: x for name, x in model.state_dict().items() if "mask" not in name})
    ostinato.prune(other, None, block=(8, 4), keep_diagonal=True, input_weights=True)
    return other


def dense(model: Denoiser) -> Denoiser:
    """Copy the weights into ``torch.nn``'s GRUs."""
    other = Denoiser(nn.GRU)
    other.load_state_dict({name: x for name, x in model.state_dict().items() if "mask" not in name})
    return other


Step = Callable[[Tensor], Tensor]  # from a frame's bands to its gains


def by_hand(model: Denoiser) -> Step:
    """Run steps that pass the state from call to call."""
    state = model.initial_state(1)

    @torch.no_grad()
    def step(x: Tensor) -> Tensor:
        nonlocal state
        gains, state = model.step(x, state)
        return gains

    return step


def prepared(model: Denoiser) -> Step:
    """Run steps by a stepper, which keeps the state, packs the kept weights, and replays the first step's operators."""
    return ostinato.Stepper(model, batch_size=1, frozen=True)


def stream(step: Step, frames: Tensor) -> tuple[Tensor, list[float]]:
    """Return all gains, and the seconds that each frame took."""
    gains, seconds = [], []
    for frame in frames:
        start = time.perf_counter()
        gains.append(step(frame[None]))
        seconds.append(time.perf_counter() - start)
    return torch.cat(gains), seconds


def main(frames: int = 3000) -> dict[str, list[float]]:
    """Print and return each network's seconds per frame: the median, and the 99th percentile."""
    torch.manual_seed(0)
    whole = Denoiser(ostinato.GRU).eval()
    pruned = prune(whole)
    bands = torch.randn(frames, BANDS)
    steps = {
        "dense, torch.nn": by_hand(dense(whole)),
        "dense, torch.nn, prepared": prepared(dense(whole)),
        "dense": prepared(whole),
        "pruned, torch.nn": by_hand(dense(pruned)),
        "pruned, by hand": by_hand(pruned),
        "pruned": prepared(pruned),
        "pruned elsewhere": prepared(zeros_as_masks(pruned)),
    }
    kept = sum(int(mask.sum()) for mask in pruned.buffers()) / sum(mask.numel() for mask in pruned.buffers())
    print(f"{kept:.0%} of the GRUs' weights are left")
    gains: dict[str, list[Tensor]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for part in bands.split(100):  # in turn, so that other load on the machine affects all alike
        for name, step in steps.items():
            outputs, times = stream(step, part)
            gains[name].append(outputs)
            seconds[name] += times
    results = {}
    for name, times in seconds.items():
        median, slow = results[name] = torch.tensor(times[50:]).quantile(torch.tensor([0.5, 0.99])).tolist()
        shown = f"a frame {median * 1e6:4.0f} µs, 99 % below {slow * 1e6:4.0f}"
        print(f"{name:25} {shown}: {FRAME / median:4.0f} times real time")
    for name, other in (("dense", "dense, torch.nn"), ("pruned", "pruned, torch.nn"), ("pruned elsewhere", "pruned")):
        difference = (torch.cat(gains[name]) - torch.cat(gains[other])).abs().max().item()
        print(f"{name} differs from {other} by {difference:.0e}")
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
