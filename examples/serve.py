"""Serving a pruned LSTM: each call takes one value, returns one forecast, and keeps the state for the next.

Trains ``torch.nn.LSTM`` to forecast a nerve cell's membrane potential (a recording that comes with Matplotlib), prunes
it to a tenth of its recurrent weights as training continues, and serves the dense and the pruned LSTM step by step, the
pruned one also with a stepper, which packs the kept weights.
"""

import copy
import time
from collections.abc import Callable

import matplotlib.cbook
import numpy as np
import torch
from torch import Tensor, nn

import ostinato

AHEAD = 10  # steps ahead to forecast
CHUNK = 200  # steps of a training sequence
TRAINED = 3600  # steps; the rest is served
DENSITY = 0.1


class Forecaster(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, hidden_size)
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(x, state)
        return self.head(y), state


def recording() -> Tensor:
    """Return the recording (T,), normalised such that its training part has mean 0 and variance 1."""
    path = matplotlib.cbook.get_sample_data("membrane.dat", asfileobj=False)
    potential = torch.from_numpy(np.fromfile(path, np.float32).reshape(-1, 2)[:, 0].copy())
    return (potential - potential[:TRAINED].mean()) / potential[:TRAINED].std()


def train(model: Forecaster, x: Tensor, steps: int, learning_rate: float, density: float = 1.0) -> None:
    """Train, and lower the density of the recurrent weights from 1 to ``density`` on the way."""
    chunks = x[:TRAINED].view(-1, CHUNK).T[:, :, None]  # (CHUNK, sequences, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for step in range(steps):
        forecast, _ = model(chunks[:-AHEAD])
        loss = nn.functional.mse_loss(forecast, chunks[AHEAD:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if density < 1 and step % 5 == 0:
            now = ostinato.cubic_density(step, density, end=steps * 2 // 3)
            ostinato.prune(model, now, block=(16, 1))


def by_hand(model: Forecaster) -> Callable[[Tensor], Tensor]:
    """Run steps that pass the state from call to call."""
    state = None

    def step(value: Tensor) -> Tensor:
        nonlocal state
        forecast, state = model(value, state)  # one step, unbatched
        return forecast

    return step


def prepared(model: Forecaster) -> Callable[[Tensor], Tensor]:
    return ostinato.Stepper(nn.Sequential(model.lstm, model.head), batch_size=1, frozen=True)


@torch.inference_mode()
def serve(name: str, model: Forecaster, step: Callable[[Tensor], Tensor], x: Tensor) -> None:
    forecasts, latencies = [], []
    for value in x[:-AHEAD]:
        start = time.perf_counter()
        forecast = step(value.view(1, 1))
        latencies.append(time.perf_counter() - start)
        forecasts.append(forecast.item())
    error = (torch.tensor(forecasts) - x[AHEAD:]).square().mean().sqrt()
    whole = model(x[:-AHEAD, None])[0][:, 0]
    difference = (torch.tensor(forecasts) - whole).abs().max()
    median, slow = np.percentile(latencies, [50, 99]) * 1e6
    print(
        f"{name:18} error {error:.3f}   a step {median:5.0f} µs, 99 % below {slow:5.0f} µs   "
        f"from the whole sequence at once {difference:.0e}"
    )


def main(steps: int = 40, hidden_size: int = 384) -> None:
    torch.manual_seed(0)
    x = recording()
    dense = Forecaster(hidden_size)
    train(dense, x, steps=steps, learning_rate=2e-3)
    pruned = copy.deepcopy(dense)
    train(pruned, x, steps=steps, learning_rate=1e-3, density=DENSITY)
    print(f"the pruned layer: {pruned.lstm.plan(batch=1).reason}\n")

    served = x[TRAINED:]
    print(f"last value         error {(served[AHEAD:] - served[:-AHEAD]).square().mean().sqrt():.3f}")
    serve("dense, torch.nn", dense, by_hand(dense), served)
    serve(f"{DENSITY:.0%} of its weights", pruned, by_hand(pruned), served)
    serve("the same, prepared", pruned, prepared(pruned), served)


if __name__ == "__main__":
    main()
