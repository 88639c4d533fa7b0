"""Training of a language model: hyperparameters, the loop, the model in several processes, and the held-out loss."""

from ostinato.training.evaluation import held_out
from ostinato.training.settings import TrainingSettings
from ostinato.training.trainer import PRECISIONS, Point, Trainer

__all__ = ["Trainer", "TrainingSettings", "Point", "held_out", "PRECISIONS"]
