"""Recurrent networks at hardware speed for PyTorch.

Public are the names in ``__all__``, and those that the reference lists of ``ostinato.checkpoint``, ``distributed``,
``models``, ``numpy``, ``processes``, ``text`` and ``training``; all else may change in any release.
"""

from ostinato.diagonal import HGRN, LRU, QRNN, RGLRU, SRU, IndRNN, ParaGRU, ParaLSTM
from ostinato.export import portable
from ostinato.minimal import HighwayMinGRU, MinGRU, MinGRUCell, MinLSTM, MinLSTMCell
from ostinato.pruning import cubic_density, prune
from ostinato.recurrence import recurrence
from ostinato.recurrent import GRU, LSTM, RNN, convert
from ostinato.scan import linear_scan, log_linear_scan
from ostinato.slstm import SLSTM
from ostinato.stepper import Stepper

__all__ = [
    "MinGRU",
    "MinGRUCell",
    "MinLSTM",
    "MinLSTMCell",
    "HighwayMinGRU",
    "RGLRU",
    "HGRN",
    "LRU",
    "QRNN",
    "SRU",
    "IndRNN",
    "ParaGRU",
    "ParaLSTM",
    "SLSTM",
    "RNN",
    "GRU",
    "LSTM",
    "convert",
    "prune",
    "cubic_density",
    "linear_scan",
    "log_linear_scan",
    "recurrence",
    "Stepper",
    "portable",
]
__version__ = "0.1.0"
