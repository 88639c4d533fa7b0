"""The training loop of a language model, and its state for checkpoints."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ostinato.checks import check_flags, check_integers, check_numbers
from ostinato.distributed import sequence_parallel
from ostinato.models import LanguageModel
from ostinato.processes import Share, part, shard_like
from ostinato.text import random_windows
from ostinato.training.capture import Differentiated, captured
from ostinato.training.evaluation import held_out
from ostinato.training.replicas import reducing, replica_of
from ostinato.training.settings import TrainingSettings, check_share, train_size

PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class Point:
    """One point of the loss curve, in nats per token; ``train_loss`` is the mean since the point before."""

    step: int
    tokens: int
    seconds: float
    train_loss: float
    held_out_loss: float

    def __post_init__(self) -> None:
        check_integers(0, step=self.step, tokens=self.tokens)
        check_numbers(seconds=self.seconds, train_loss=self.train_loss, held_out_loss=self.held_out_loss)


class Trainer:
    """Trains a language model on a text, in one process or several.

    Every chunk begins with a zero state at a random position of the text.  Tokens stay on the device, and the loss is
    read only at the end of :meth:`advance`, so that steps do not synchronise with the device.  Dropout draws from
    PyTorch's global generator, which the caller seeds.

    Several processes each get the same text, settings and initial weights.  All draw the same chunks and each takes
    its rows of the batch, so the loss curve does not depend on their number (with dropout, which differs between
    processes, in expectation).

    Args:
        model: trained in place.
        tokens: the whole text, (N,), integers.
        settings: the hyperparameters; the batch is that of all processes together.
        device: where to train.
        precision: "float32", "bfloat16" (autocast), or "auto": bfloat16 on a GPU that supports it.
        compile: whether to compile the model with ``torch.compile``.
        mesh: the processes (:func:`ostinato.processes.make_mesh`); along "cp" they shard each chunk over time
            (:mod:`ostinato.distributed`).
        shard: shard weights, gradients and momenta over the processes (FSDP2) instead of replicating them (DDP).
        accumulate: micro-batches per step, whose gradients are summed before they are all-reduced.
        graph: whether to replay the loss and its gradients from a CUDA graph, where :meth:`can_capture`.  It is
            captured at the first step; from then on parameters and buffers must stay the same tensors.

    Raises:
        TypeError: a model or settings of another class, tokens that are not a tensor of integers, an ``accumulate``
            that is not an integer, or a flag that is not a bool.
        ValueError: tokens that are not (N,), a text too short for a held-out chunk, an unknown precision, a
            batch or chunk too small for the processes, no micro-batch, a limit in seconds for several of them, or a
            ``graph`` where none can be captured.

    Example:
        >>> import torch
        >>> from ostinato.models import LanguageModel
        >>> from ostinato.training import Trainer, TrainingSettings
        >>> model = LanguageModel(vocab_size=2, width=8, num_layers=1)
        >>> settings = TrainingSettings(steps=50, batch_size=4, chunk_length=16, warmup_steps=5)
        >>> trainer = Trainer(model, torch.arange(4000) % 2, settings)
        >>> loss = trainer.advance(50)
        >>> trainer.evaluate().held_out_loss < 0.6931  # log(2), that of a random guess
        True
    """

    def __init__(
        self,
        model: LanguageModel,
        tokens: Tensor,
        settings: TrainingSettings,
        *,
        device: torch.device | str | int = "cpu",
        precision: str = "auto",
        compile: bool = False,
        mesh: DeviceMesh | None = None,
        shard: bool = False,
        accumulate: int = 1,
        graph: bool = False,
    ) -> None:
        for name, value, kind in (("model", model, LanguageModel), ("settings", settings, TrainingSettings)):
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__}; got {type(value).__name__}")
        check_flags(compile=compile, shard=shard, graph=graph)
        if not isinstance(precision, str) or precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
        check_integers(1, accumulate=accumulate)
        split = train_size(tokens, settings)
        self._share, self._accumulate = Share.on(mesh), accumulate
        self._processes, self._rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_rank())
        check_share(settings, self._share, accumulate)
        if settings.seconds is not None and mesh is not None:
            raise ValueError("seconds must be None for several processes, whose clocks differ; limit the steps")
        self.settings = settings
        self.device = torch.device(device)
        if graph and not self.can_capture(self.device, compile, mesh, accumulate):
            raise ValueError(
                "graph must be False except on a CUDA device, in one process, without compile and with accumulate 1"
            )
        self._graph = graph
        self._replayed: Differentiated | None = None
        self.precision = _best_precision(self.device) if precision == "auto" else precision
        if mesh is not None and self._share.steps_of > 1:
            sequence_parallel(model, mesh["cp"])
        self.model = model.to(self.device)
        self._replica = replica_of(self.model, mesh, shard)
        self.train_tokens = tokens[:split].to(self.device)
        self.held_out_tokens = tokens[split:][: settings.held_out_limit].to(self.device)
        self.optimizer = _optimizer_of(self.model, settings)
        self.generator = torch.Generator(self.device).manual_seed(settings.seed)
        self.step = 0
        self.seconds = 0.0
        self.curve: list[Point] = []
        self._loss_sum = torch.zeros((), device=self.device)
        self._loss_of = torch.compile(_loss) if compile else _loss
        if self._rank > 0:  # the first process draws what a single one would
            self._draw_own_dropout()

    @staticmethod
    def can_capture(device: torch.device, compile: bool, mesh: DeviceMesh | None, accumulate: int) -> bool:
        """Whether a CUDA graph can replay a step: on a GPU, in one process, of one micro-batch, and not compiled."""
        return device.type == "cuda" and not compile and mesh is None and accumulate == 1

    @property
    def tokens_per_step(self) -> int:
        """The tokens that all processes together train on in a step."""
        return self.settings.batch_size * self.settings.chunk_length

    @property
    def spread(self) -> str:
        """A prefix to the device's name, "4 x " with four processes; empty with one."""
        return f"{self._processes} x " if self._processes > 1 else ""

    @property
    def progress(self) -> float:
        """The fraction of the training that is done, 0 to 1."""
        if self.settings.seconds is not None:
            return min(self.seconds / self.settings.seconds, 1.0)
        return min(self.step / self.settings.steps, 1.0)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        settings = self.settings
        warm_up = min((self.step + 1) / max(settings.warmup_steps, 1), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        return settings.learning_rate * warm_up * (settings.final_rate + (1 - settings.final_rate) * cosine)

    def advance(self, steps: int) -> float:
        """Take optimiser steps.

        Returns:
            The mean training loss since the last evaluation, in nats per token.

        Raises:
            FloatingPointError: a loss that is not finite.
        """
        settings, before, start = self.settings, self.seconds, time.perf_counter()
        self.model.train()
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate
            self.optimizer.zero_grad()
            batches = self._draw()
            differentiate = self._replayed or self._differentiated()
            if self._graph and self._replayed is None:
                differentiate = self._replayed = captured(differentiate, self._parameters(), *batches[0])
            for index, batch in enumerate(batches):
                with reducing(self._replica, index == len(batches) - 1):
                    self._loss_sum += differentiate(*batch)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
            self.optimizer.step()
            self.step += 1
            self.seconds = before + time.perf_counter() - start
        mean = self._mean_loss()  # synchronises with the device, which the time must include
        self.seconds = before + time.perf_counter() - start
        self._check("training", mean)
        return mean

    def evaluate(self) -> Point:
        """Compute the held-out loss, and append a point to ``curve``.

        Raises:
            FloatingPointError: a loss that is not finite.
        """
        with self._autocast():
            held_out_loss = held_out(self.model, self.held_out_tokens, self.tokens_per_step, self._share)
        self._check("held-out", held_out_loss)
        point = Point(self.step, self.step * self.tokens_per_step, self.seconds, self._mean_loss(), held_out_loss)
        self.curve.append(point)
        self._loss_sum.zero_()
        return point

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that :meth:`restore` needs to resume with the same model and text.

        A collective: every process must call it.  Sharded tensors are not gathered.

        Returns:
            A JSON object, and tensors by name, some of which change as the training goes on: copy what is kept.
        """
        tensors = {"loss_sum": self._share.total(self._loss_sum), "windows": self.generator.get_state()}
        tensors |= {_dropout_name(rank): state for rank, state in enumerate(self._share.gather(self._dropout_state()))}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
        return {
            "settings": asdict(self.settings),
            "step": self.step,
            "seconds": self.seconds,
            "curve": [asdict(point) for point in self.curve],
            "device": self.device.type,
        }, tensors

    def restore(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Resume from what :meth:`state` returned: on the same type of device, as if never interrupted.

        The number of processes may differ; additional ones draw other dropout masks.

        Args:
            state, tensors: of :meth:`state`.

        Raises:
            ValueError: something is missing, has a value that no training has, or is not of the shape and dtype that
                this trainer's model gives it.
        """
        try:
            check_integers(0, step=state["step"])
            check_numbers(seconds=state["seconds"])
            if not 0 <= state["seconds"] < math.inf:
                raise ValueError(f"seconds must be at least 0 and finite; got {state['seconds']}")
            self.step, self.seconds = state["step"], float(state["seconds"])
            self.curve = [Point(**point) for point in state["curve"]]
            same_device = state["device"] == self.device.type
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected the state of a training; {type(error).__name__}: {error}") from None
        expected = self._state_layout(tensors, same_device)
        for name, layout in expected.items():
            actual = _layout(tensors[name]) if name in tensors else "absent"
            if actual != layout:
                raise ValueError(
                    f"expected the state of a training of this model; {name} should be {layout} and is {actual}"
                )
        self._loss_sum.copy_(tensors["loss_sum"])
        if self._rank > 0:  # the sum of all processes' sums
            self._loss_sum.zero_()
        self._restore_optimizer({name: tensors[name] for name in expected if name.startswith("optimizer.")})
        try:
            if same_device:
                self.generator.set_state(tensors["windows"])
            else:
                self.generator.manual_seed(self.settings.seed + self.step)
            if _dropout_name(self._rank) in expected:
                self._set_dropout_state(tensors[_dropout_name(self._rank)])
            elif self._rank > 0:
                self._draw_own_dropout()
        except RuntimeError as error:  # PyTorch's, of a generator's state
            raise ValueError(f"expected the state of a training; {error}") from None

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """Load the optimiser's state from whole tensors by name, "optimizer.NUMBER.KEY"."""
        state, parameters = self.optimizer.state_dict(), self._parameters()
        for name, tensor in tensors.items():
            _, number, key = name.split(".")
            value = tensor.clone()  # the optimiser changes it in place
            value = value if key == "step" else shard_like(value, parameters[int(number)])
            state["state"].setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict(state)

    def _state_layout(self, tensors: dict[str, Tensor], same_device: bool) -> dict[str, str]:
        """Shape and dtype of each tensor that :meth:`restore` needs, for this model at this step."""
        layout = {"loss_sum": _layout(self._loss_sum)}
        if self.step:
            for number, parameter in enumerate(self._parameters()):
                layout |= {f"optimizer.{number}.{key}": _layout(parameter) for key in ("exp_avg", "exp_avg_sq")}
                layout[f"optimizer.{number}.step"] = _layout(torch.empty((), dtype=torch.float32))
        if same_device:
            layout["windows"] = _layout(self.generator.get_state())
            name = _dropout_name(self._rank)
            if self._rank == 0 or name in tensors:
                layout[name] = _layout(self._dropout_state())
        return layout

    def _parameters(self) -> list[Tensor]:
        """All parameters, in the order of the optimiser's indices."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _draw(self) -> list[tuple[Tensor, Tensor]]:
        """This process's shard of the next chunks, as micro-batches of inputs and targets, (rows, steps)."""
        settings, share = self.settings, self._share
        inputs, targets = random_windows(self.train_tokens, settings.batch_size, settings.chunk_length, self.generator)
        shard = share.rows(settings.batch_size), share.steps(settings.chunk_length)
        inputs, targets = inputs[shard], targets[shard]
        micro_batches = [part(len(inputs), number, self._accumulate) for number in range(self._accumulate)]
        return [(inputs[rows], targets[rows]) for rows in micro_batches]

    def _draw_own_dropout(self) -> None:
        """Seed dropout's random numbers differently from other processes, and from the start when resumed later."""
        # Primes, so that seeds, steps and ranks seldom add up to the same.
        torch.manual_seed((self.settings.seed * 1_000_003 + self.step * 8191 + self._rank) % (1 << 63))

    def _differentiated(self) -> Differentiated:
        """A function of a micro-batch: its share of the loss, whose gradients are added to the parameters'.

        A captured graph keeps it, so it must not refer to the trainer, which keeps the graph.
        """
        loss_of, replica, tokens, processes = self._loss_of, self._replica, self.tokens_per_step, self._processes
        autocast = self._autocast()

        def differentiate(inputs: Tensor, targets: Tensor) -> Tensor:
            with autocast:
                loss = loss_of(replica, inputs, targets) * (inputs.numel() / tokens)
            (loss * processes).backward()  # the all-reduce takes the mean over the processes
            return loss.detach()

        return differentiate

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def _mean_loss(self) -> float:
        return self._share.total(self._loss_sum).item() / max(self.step - (self.curve[-1].step if self.curve else 0), 1)

    def _check(self, kind: str, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the {kind} loss is {loss} at step {self.step}; a lower learning rate than "
                f"{self.settings.learning_rate} may help"
            )

    def _dropout_state(self) -> Tensor:
        if self.device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def _set_dropout_state(self, state: Tensor) -> None:
        if self.device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.device).set_rng_state(state, self.device)


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats per token."""
    logits, _ = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _best_precision(device: torch.device) -> str:
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "bfloat16" if has_bfloat16 else "float32"


def _optimizer_of(model: nn.Module, settings: TrainingSettings) -> torch.optim.AdamW:
    # Only matrices decay: norms and biases are scales and offsets, with no reason to be small.
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, settings.beta2), fused=True)


def _dropout_name(rank: int) -> str:
    return f"dropout.{rank}" if rank else "dropout"


def _layout(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
