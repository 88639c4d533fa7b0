"""Streaming audio on one core: a network of RNNoise's shape, pruned as RNNoise is, frame by frame.

Bands of a frame of 10 ms come in, gains for 32 bands go out: two convolutions, three GRUs of 256, and a layer over all
of them (Valin 2018, arXiv 1709.08243, in its second version's shape).  Weights are random: what is shown is the time.
"""

import copy
import time

import torch
from torch import Tensor, nn

import ostinato

BANDS, GAINS, SIZE = 65, 32, 256
FRAME = 0.01  # seconds
DENSITIES = {"r": 0.3, "z": 0.2, "n": 0.5}  # of a GRU's gates, in blocks of 8 by 4, beside the recurrent diagonal


class Denoiser(nn.Module):
    """Gains (B, GAINS) from bands (B, BANDS), a frame at a time."""

    def __init__(self, gru: type[nn.GRU]) -> None:
        super().__init__()
        # Convolutions over three frames, of which two are kept.
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
    """Most of the GRUs' weights, recurrent and of the input; here by size, in RNNoise while it trains."""
    pruned = copy.deepcopy(model)
    ostinato.prune(pruned, DENSITIES, block=(8, 4), keep_diagonal=True, input_weights=True)
    return pruned


def zeros_as_masks(model: Denoiser) -> Denoiser:
    """From a model whose weights are zero where they were pruned, as one that comes from elsewhere."""
    other = Denoiser(ostinato.GRU)
    other.load_state_dict({name: x for name, x in model.state_dict().items() if "mask" not in name})
    ostinato.prune(other, None, block=(8, 4), keep_diagonal=True, input_weights=True)
    return other


def dense(model: Denoiser) -> Denoiser:
    """The same weights in ``torch.nn``'s GRUs."""
    other = Denoiser(nn.GRU)
    other.load_state_dict({name: x for name, x in model.state_dict().items() if "mask" not in name})
    return other


def stream(model: Denoiser, frames: Tensor) -> tuple[Tensor, list[float]]:
    """All gains, and the seconds that each frame took."""
    stepper, gains, seconds = ostinato.Stepper(model, batch_size=1, frozen=True), [], []
    for frame in frames:
        start = time.perf_counter()
        gains.append(stepper(frame[None]))
        seconds.append(time.perf_counter() - start)
    return torch.cat(gains), seconds


def main(frames: int = 3000) -> None:
    torch.manual_seed(0)
    whole = Denoiser(ostinato.GRU)
    pruned = prune(whole)
    bands = torch.randn(frames, BANDS)
    models = {
        "dense, torch.nn": dense(whole),
        "dense": whole,
        "pruned, torch.nn": dense(pruned),
        "pruned": pruned,
        "pruned elsewhere": zeros_as_masks(pruned),
    }
    kept = sum(int(mask.sum()) for mask in pruned.buffers()) / sum(mask.numel() for mask in pruned.buffers())
    print(f"{kept:.0%} of the GRUs' weights are left")
    gains = {}
    for name, model in models.items():
        stream(model.eval(), bands[:50])
        gains[name], seconds = stream(model, bands)
        median, slow = torch.tensor(seconds).quantile(torch.tensor([0.5, 0.99])).tolist()
        times = f"a frame {median * 1e6:4.0f} µs, 99 % below {slow * 1e6:4.0f}"
        print(f"{name:16} {times}: {FRAME / median:4.0f} times real time")
    for name, other in (("dense", "dense, torch.nn"), ("pruned", "pruned, torch.nn"), ("pruned elsewhere", "pruned")):
        difference = (gains[name] - gains[other]).abs().max().item()
        print(f"{name} differs from {other} by {difference:.0e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
