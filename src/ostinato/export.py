"""Exported programs that run without this library."""

from contextlib import AbstractContextManager

from ostinato.kernels.operators import export


def portable() -> AbstractContextManager[None]:
    """Have ``torch.export`` write layers and scans in PyTorch's own operators: a context manager.

    A program that ``torch.export.export`` traces in the block holds PyTorch's loop over time in place of the operators
    ``ostinato::...``, which run in this library's kernels and only where it is imported.  It can be saved, loaded,
    decomposed and compiled without this library; batch and time may be dynamic.  In it every layer and scan, minimal
    layers too, runs step by step.

    ``torch.onnx.export(..., dynamo=True)`` needs no such block: ONNX's own RNN, GRU and LSTM take the layers' places,
    its Scan those of scans and minimal layers.

    Raises:
        NotImplementedError: in the block, packed sequences, and tracing by anything else.

    Example:
        >>> import torch, ostinato
        >>> from torch.export import Dim
        >>> gru, x = ostinato.GRU(8, 16).eval(), torch.randn(100, 4, 8)
        >>> with ostinato.portable():
        ...     program = torch.export.export(gru, (x,), dynamic_shapes=({0: Dim("time"), 1: Dim("batch")},))
        >>> any("ostinato" in str(node.target) for node in program.graph.nodes)
        False
        >>> x = torch.randn(30, 2, 8)
        >>> torch.allclose(program.module()(x)[0], gru(x)[0], atol=1e-6)
        True
    """
    return export.portable()
