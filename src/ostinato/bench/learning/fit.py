"""Training a model on a task of one right answer, in stages of growing length."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.bench.learning.tasks import IGNORED, Task
from ostinato.checks import check_integers
from ostinato.minimal import MinGRU, MinLSTM
from ostinato.models import LanguageModel


@dataclass(frozen=True)
class Stage:
    """At most ``steps`` steps on ``batch_size`` sequences of ``length``; it ends early once ``accuracy`` is reached.

    Raises ValueError if one of the three integers is below 1.
    """

    length: int
    batch_size: int
    steps: int
    accuracy: float | None = None

    def __post_init__(self) -> None:
        check_integers(1, length=self.length, batch_size=self.batch_size, steps=self.steps)


@dataclass(frozen=True)
class Progress:
    """How far a training is, with the loss and accuracy averaged over the latest :meth:`TaskTrainer.advance`."""

    step: int
    tokens: int
    seconds: float
    length: int
    train_loss: float
    train_accuracy: float


class TaskTrainer:
    """Trains ``model`` on sequences of ``task``, drawn anew for every step on ``device``.

    The optimiser is AdamW without weight decay, since no sequence comes twice and none can be memorised.  The learning
    rate has a linear warm-up, and a cosine decay to zero over the last stage.

    >>> import torch
    >>> from ostinato.bench.learning.fit import Stage, TaskTrainer
    >>> from ostinato.bench.learning.tasks import Bits
    >>> from ostinato.models import LanguageModel
    >>> model = LanguageModel(2, width=16, num_layers=1, dropout=0.0)
    >>> trainer = TaskTrainer(model, Bits("majority"), [Stage(length=10, batch_size=16, steps=100)], learning_rate=1e-2)
    >>> trainer.advance(100).train_accuracy > 0.6
    True
    """

    def __init__(
        self,
        model: LanguageModel,
        task: Task,
        stages: list[Stage],
        *,
        learning_rate: float,
        warmup_steps: int = 100,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model.to(device)
        self.task, self.stages, self.device = task, stages, torch.device(device)
        self.peak, self.warmup_steps = learning_rate, warmup_steps
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0, fused=True
        )
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.stage = self.step = self.stage_step = self.tokens = 0
        self.seconds = 0.0

    @property
    def finished(self) -> bool:
        return self.stage == len(self.stages)

    @property
    def progress(self) -> float:
        """The fraction of the training that is done; a stage that ended early counts as complete."""
        done = sum(stage.steps for stage in self.stages[: self.stage]) + self.stage_step
        return done / sum(stage.steps for stage in self.stages)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        warm_up = min((self.step + 1) / max(self.warmup_steps, 1), 1.0)
        last = self.stage == len(self.stages) - 1
        done = self.stage_step / self.stages[self.stage].steps if last else 0.0
        return self.peak * warm_up * 0.5 * (1 + math.cos(math.pi * done))

    def advance(self, steps: int) -> Progress:
        """Take up to ``steps`` steps of the current stage, and move on to the next stage if it is done.

        The host waits for the device only at the end.  Raises FloatingPointError if the loss is not finite.
        """
        stage, start = self.stages[self.stage], time.perf_counter()
        steps = min(steps, stage.steps - self.stage_step)
        sums = torch.zeros(2, device=self.device)
        self.model.train()
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate
            inputs, targets = self.task.draw(stage.batch_size, stage.length, self.generator)
            logits, _ = self.model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            sums += torch.stack([loss.detach(), _accuracy(logits, targets)])
            self.step += 1
            self.stage_step += 1
            self.tokens += inputs.numel()
        loss, accuracy = (sums / steps).tolist()
        self.seconds += time.perf_counter() - start
        if not math.isfinite(loss):
            raise FloatingPointError(f"the training loss is {loss} at step {self.step}")
        learned = stage.accuracy is not None and accuracy >= stage.accuracy
        if learned or self.stage_step == stage.steps:
            self.stage, self.stage_step = self.stage + 1, 0
        return Progress(self.step, self.tokens, self.seconds, stage.length, loss, accuracy)

    @torch.no_grad()
    def evaluate(self, length: int, sequences: int, *, seed: int, at_once: int = 64) -> Tensor:
        """Return the accuracy at each time step (T,), NaN where no answer is asked, on sequences drawn with ``seed``.

        The seed is apart from the training's, so that every evaluation sees the same sequences.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        counts = []
        self.model.eval()
        for begin in range(0, sequences, at_once):
            inputs, targets = self.task.draw(min(at_once, sequences - begin), length, generator)
            logits, _ = self.model(inputs)
            counts.append(torch.stack([(logits.argmax(-1) == targets).sum(0), (targets != IGNORED).sum(0)]))
        self.model.train()
        right, asked = torch.stack(counts).sum(0).cpu()
        return right / asked


def remember(model: LanguageModel, length: int) -> None:
    r"""Initialise the gate biases of minGRU and minLSTM so that their units forget at a wide range of time scales.

    The share of the state that a step replaces starts at 1/(1 + u) in a minGRU and 1/(1 + sqrt(u)) in a minLSTM, log u
    uniform from 0 to log(length): the initialisation of Tallec and Ollivier 2018 (arXiv 1804.11188), spread over the
    logarithm.  Other cells keep theirs.
    """
    for module in model.modules():
        if isinstance(module, MinGRU | MinLSTM):
            size = module.hidden_size
            bias = module.get_parameter("bias_ih_l0").data
            logarithm = torch.rand(size, device=bias.device) * math.log(length)
            if isinstance(module, MinGRU):
                bias[:size] = -logarithm
            else:
                bias[:size], bias[size : 2 * size] = logarithm / 2, -logarithm / 2


def _accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    asked = targets != IGNORED
    return ((logits.argmax(-1) == targets) & asked).sum() / asked.sum()
