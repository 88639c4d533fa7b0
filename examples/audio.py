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
        # A convolution over three frames, of which two are kept.
        self.conv1 = nn.Linear(3 * BANDS, 128)
        self.conv2 = nn.Linear(3 * 128, SIZE)
        self.grus = nn.ModuleList(gru(SIZE, SIZE) for _ in range(3))
        self.gains = nn.Linear(4 * SIZE, GAINS)

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        widths = 2 * BANDS, 2 * 128
        frames = (torch.zeros(batch_size, width) for width in widths)
        return *frames, *(torch.zeros(1, batch_size, SIZE) for _ in self.grus)

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        last1, last2, *hidden = state
        x = torch.cat([last1, x], 1)
        y = torch.cat([last2, torch.tanh(self.conv1(x))], 1)
        z = torch.tanh(self.conv2(y))
        outputs, after = [z], []
        for gru, h in zip(self.grus, hidden, strict=True):
            if isinstance(gru, ostinato.GRU):
                z, h = gru.step(z, h)
            else:
                z, h = gru(z[None], h)
                z = z[0]
            outputs.append(z)
            after.append(h)
        gains = torch.sigmoid(self.gains(torch.cat(outputs, 1)))
        return gains, (x[:, BANDS:], y[:, 128:], *after)


def prune(model: Denoiser) -> Denoiser:
    """Most of the GRUs' weights, recurrent and of the input; here by size, in RNNoise while it trains."""
    pruned = copy.deepcopy(model)
    for gru in pruned.grus:
        ostinato.prune(gru, DENSITIES, block=(8, 4), keep_diagonal=True, input_weights=True)
    return pruned


def zeros_as_masks(model: Denoiser) -> Denoiser:
    """From a model whose weights are zero where they were pruned, as one that comes from elsewhere."""
    other = Denoiser(ostinato.GRU)
    other.load_state_dict(model.state_dict(), strict=False)
    for gru in other.grus:
        ostinato.prune(gru, None, block=(8, 4), keep_diagonal=True, input_weights=True)
    return other


def dense(model: Denoiser) -> Denoiser:
    """The same weights in ``torch.nn``'s GRUs."""
    other = Denoiser(nn.GRU)
    weights = {name: x for name, x in model.state_dict().items() if "mask" not in name}
    other.load_state_dict(weights)
    return other


def stream(model: Denoiser, frames: Tensor) -> tuple[Tensor, list[float]]:
    """All gains, and the seconds that each frame took."""
    stepper, gains, seconds = ostinato.Stepper(model, batch_size=1), [], []
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
