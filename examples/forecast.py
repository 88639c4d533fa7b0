"""Forecasting a real time series: at every step the next 20 values of a nerve cell's membrane potential.

The recording comes with Matplotlib.  The network reads the whole training part, 3,600 steps, in one parallel pass at
every update.  In use it reads one value at a time and keeps its state.
"""

import matplotlib.cbook
import numpy as np
import torch
from torch import Tensor, nn

import ostinato

AHEAD = 20  # values to forecast
TRAINED = 3600  # steps; the rest is held out


def recording() -> Tensor:
    """Return the recording (T,), normalised such that its training part has mean 0 and variance 1."""
    path = matplotlib.cbook.get_sample_data("membrane.dat", asfileobj=False)
    potential = torch.from_numpy(np.fromfile(path, np.float32).reshape(-1, 2)[:, 0].copy())
    return (potential - potential[:TRAINED].mean()) / potential[:TRAINED].std()


class Forecaster(nn.Module):
    """Predicts, from the values so far, how far each of the next ``AHEAD`` values will be from the last one."""

    def __init__(self, hidden_size: int = 32) -> None:
        super().__init__()
        self.recurrent = ostinato.MinGRU(2, hidden_size, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden_size, AHEAD)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0])

    def step(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        y, h = self.recurrent.step(x, h)
        return self.head(y), h


def linear_forecast(x: Tensor, changes: Tensor, order: int = 32) -> Tensor:
    """Return the least-squares forecast from the last ``order`` values, as a baseline."""
    past = nn.functional.pad(x, (order - 1, 0)).unfold(0, order, 1)[: len(changes)]
    past = nn.functional.pad(past, (0, 1), value=1.0).double()
    fit = slice(order, TRAINED - AHEAD)
    weights = torch.linalg.lstsq(past[fit], changes[fit].double()).solution
    return (past @ weights).float()


def main(updates: int = 300) -> None:
    torch.manual_seed(0)
    x = recording()
    inputs = torch.stack([x, x.diff(prepend=x[:1])], dim=1)  # (T, 2): the value and its last change
    changes = x.unfold(0, AHEAD, 1)[1:] - x[:-AHEAD, None]  # (T - AHEAD, AHEAD)
    train, held_out = slice(0, TRAINED - AHEAD), slice(TRAINED, len(changes))

    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=updates)
    for update in range(1, updates + 1):
        loss = (model(inputs[None, train])[0] - changes[train]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 100 == 0:
            print(f"update {update}: training error {loss.sqrt():.3f}")

    with torch.no_grad():
        forecasts = {
            "minGRU": model(inputs[None])[0, : len(changes)],
            "linear": linear_forecast(x, changes),
            "last value": torch.zeros_like(changes),
        }
        print("\nheld-out error, in standard deviations   1 ahead  10 ahead  20 ahead  all")
        for name, forecast in forecasts.items():
            errors = (forecast - changes)[held_out].square().mean(0).sqrt()
            columns = "".join(f"{errors[ahead - 1]:10.3f}" for ahead in (1, 10, 20))
            print(f"{name:38}{columns}{errors.square().mean().sqrt():7.3f}")

        h = None
        for x_t in inputs[:TRAINED]:  # as the values arrive
            forecast, h = model.step(x_t, h)
        difference = (forecast - forecasts["minGRU"][TRAINED - 1]).abs().max()
        print(f"\nstep by step, the forecast differs from the parallel one by {difference:.1e}")


if __name__ == "__main__":
    main()
