"""The state before each step, by ``states_before.cu``, which copies rows in words as wide as their alignment allows."""

import functools
import operator
import struct

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent.sequences import Sequences

WORDS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}  # by bytes
THREADS = 256  # in a block
AHEAD = 4  # words that a thread copies at once


def previous(rows: Tensor, first: Tensor | None, sequences: Sequences) -> Tensor:
    """The state before each step, in one launch; see :mod:`ostinato.kernels.persistent.reference`."""
    batch, offsets, resets, reverse = sequences
    rows, first = rows.contiguous(), None if first is None else first.to(rows.dtype).contiguous()
    resets = None if resets is None else resets.contiguous()
    before = torch.empty_like(rows)
    addresses = [0 if x is None else x.data_ptr() for x in (rows, first, before, offsets, resets)]
    size, steps = rows.shape[1] * rows.itemsize, sequences.length(rows)
    word = functools.reduce(operator.or_, addresses[:3], size | max(WORDS))
    word &= -word  # the largest power of two that divides all addresses and sizes
    parts = -(-batch * size // (word * THREADS * AHEAD))
    source, device = nvrtc.source("persistent/cuda/states_before.cu"), rows.get_device()
    kernel = nvrtc.load_kernel("states_before", source, macros(word), device)
    parameters = struct.pack("5Q5i", *addresses, steps, batch, size // word, parts, int(reverse))
    kernel.launch(device, steps * parts, THREADS, parameters)
    return before


def macros(word: int) -> nvrtc.Macros:
    """The preprocessor definitions for ``states_before.cu``."""
    return ("WORD", WORDS[word]), ("THREADS", THREADS), ("AHEAD", AHEAD)
