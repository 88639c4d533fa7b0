"""Recurrent layers in which each channel's state depends on no other channel's.

Each file has a paper's recurrence, a few lines of PyTorch from which :func:`ostinato.recurrence` makes the passes over
time, and the layer: the matrix products that compute the recurrence's arguments from the input, and the initialisation.
"""

from ostinato.diagonal.hgrn import HGRN
from ostinato.diagonal.indrnn import IndRNN
from ostinato.diagonal.lru import LRU
from ostinato.diagonal.para import ParaGRU, ParaLSTM
from ostinato.diagonal.qrnn import QRNN
from ostinato.diagonal.rg_lru import RGLRU
from ostinato.diagonal.sru import SRU

__all__ = ["RGLRU", "HGRN", "LRU", "QRNN", "SRU", "IndRNN", "ParaGRU", "ParaLSTM"]
