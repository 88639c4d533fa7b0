"""Recurrent layers whose channels do not see each other's states: an equation, a product or two, and where they begin.

Each file has the recurrence of a paper, a few lines of PyTorch from which :func:`ostinato.recurrence` makes the passes
over time, and the layer, which computes what the recurrence takes from the input, as matrix products.
"""

from ostinato.diagonal.hgrn import HGRN
from ostinato.diagonal.indrnn import IndRNN
from ostinato.diagonal.lru import LRU
from ostinato.diagonal.para import ParaGRU, ParaLSTM
from ostinato.diagonal.qrnn import QRNN
from ostinato.diagonal.rg_lru import RGLRU
from ostinato.diagonal.sru import SRU

__all__ = ["RGLRU", "HGRN", "LRU", "QRNN", "SRU", "IndRNN", "ParaGRU", "ParaLSTM"]
