"""Minimal cells for NumPy: arrays in, arrays out; PyTorch works behind them.

=================  =============================================
MinGRUCell         on the CPU
MinLSTMCell        on the CPU
MinGRUCellCUDA     on an NVIDIA GPU; the same model and interface
MinLSTMCellCUDA    on an NVIDIA GPU; the same model and interface
CUDA_AVAILABLE     whether the last two can be made here
=================  =============================================
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from ostinato.minimal import MinGRU, MinLSTM
from ostinato.minimal.steps import next_state

__all__ = ["CUDA_AVAILABLE", "MinGRUCell", "MinGRUCellCUDA", "MinLSTMCell", "MinLSTMCellCUDA"]

CUDA_AVAILABLE: bool

Array = NDArray[Any]
# Used around all computation, as the caller's autocast would change dtypes; torch.autocast takes several times as long.
_without_autocast = torch._C._DisableAutocast


def __getattr__(name: str) -> Any:
    if name == "CUDA_AVAILABLE":  # evaluated lazily: it needs the CUDA driver
        return torch.cuda.is_available()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Cell:
    """One minimal layer, its weights and the three ways to run it."""

    _layer_type: type[MinGRU] | type[MinLSTM]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        candidate: str = "linear",
        dtype: DTypeLike = np.float64,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        try:
            self.dtype = np.dtype(dtype)
        except TypeError:
            raise TypeError(f"dtype must be float32 or float64; got {dtype!r}") from None
        if self.dtype not in (np.float32, np.float64):
            raise TypeError(f"dtype must be float32 or float64; got {self.dtype}")
        input_size, hidden_size = (int(n) if isinstance(n, np.integer) else n for n in (input_size, hidden_size))
        self._device = self._choose_device()
        self._layer = self._layer_type(
            input_size,
            hidden_size,
            batch_first=True,
            candidate=candidate,
            device=self._device,
            dtype=torch.float32 if self.dtype == np.float32 else torch.float64,
        ).requires_grad_(False)
        self.input_size, self.hidden_size, self.candidate = input_size, hidden_size, candidate
        try:
            rng = np.random.default_rng(seed)
        except (TypeError, ValueError) as error:
            raise type(error)(f"seed must be None, an integer from 0 on or a Generator; {error}") from None
        bound = hidden_size**-0.5
        self.weight = rng.uniform(-bound, bound, self.weight.shape)
        self.bias = rng.uniform(-bound, bound, self.bias.shape)

    def __repr__(self) -> str:
        sizes = f"{self.input_size}, {self.hidden_size}"
        return f"{type(self).__name__}({sizes}, candidate={self.candidate!r}, dtype={self.dtype.name!r})"

    @property
    def weight(self) -> Array:
        """All gates' input weights, (gates * hidden_size, input_size); read-only, replaced by assignment."""
        return _read_only(self._layer.get_parameter("weight_ih_l0"))

    @weight.setter
    def weight(self, value: ArrayLike) -> None:
        self._assign("weight", self._layer.get_parameter("weight_ih_l0"), value)

    @property
    def bias(self) -> Array:
        """All gates' biases, (gates * hidden_size,); read-only, replaced by assignment."""
        return _read_only(self._layer.get_parameter("bias_ih_l0"))

    @bias.setter
    def bias(self, value: ArrayLike) -> None:
        self._assign("bias", self._layer.get_parameter("bias_ih_l0"), value)

    def forward(self, x_t: ArrayLike, h_prev: ArrayLike | None = None) -> Array:
        """The next state from one time step's input.

        Args:
            x_t: (input_size,) or (B, input_size).
            h_prev: the state before, (hidden_size,) or (B, hidden_size); zero if absent.

        Returns:
            h_t, shaped as ``h_prev``.

        Raises:
            TypeError: an array that is not of a floating dtype.
            ValueError: shapes that do not fit.
        """
        x, h = self._checked("x_t", x_t, "h_prev", h_prev, time_axes=0)
        return self._steps(x[..., None, :], h)[..., 0, :]

    def process_sequence(self, x_seq: ArrayLike, h0: ArrayLike | None = None) -> Array:
        """All states of a sequence, one time step after the other.

        Args:
            x_seq: (T, input_size) or (B, T, input_size).
            h0: the state before the first step, (hidden_size,) or (B, hidden_size); zero if absent.

        Returns:
            (T, hidden_size) or (B, T, hidden_size).

        Raises:
            TypeError: an array that is not of a floating dtype.
            ValueError: shapes that do not fit.
        """
        x, h = self._checked("x_seq", x_seq, "h0", h0, time_axes=1)
        return self._steps(x, h)

    def process_sequence_parallel(self, x_seq: ArrayLike, h0: ArrayLike | None = None) -> Array:
        """The same states as :meth:`process_sequence`, by one matrix product and one scan over all time steps.

        Arguments, result and errors are :meth:`process_sequence`'s.
        """
        x, h = self._checked("x_seq", x_seq, "h0", h0, time_axes=1)
        return self._run(lambda x, h: self._layer(x, h)[0], x, h)

    def _choose_device(self) -> torch.device:
        """Where the cell computes."""
        return torch.device("cpu")

    def _steps(self, x: Array, h: Array | None) -> Array:
        """The states of a sequence, step by step."""
        raise NotImplementedError

    def _run(self, function: Callable[[Tensor, Tensor | None], Tensor], x: Array, h: Array | None) -> Array:
        """Apply a function of tensors on the cell's device to arrays; its states have an axis for layers."""
        raise NotImplementedError

    def _checked(
        self, x_name: str, x: ArrayLike, h_name: str, h: ArrayLike | None, time_axes: int
    ) -> tuple[Array, Array | None]:
        """The arrays in the cell's dtype."""
        x = self._floating(x_name, x)
        if x.ndim - time_axes not in (1, 2) or x.shape[-1] != self.input_size:
            time = "T, " * time_axes
            expected = f"({time}{self.input_size}{'' if time else ','}) or (B, {time}{self.input_size})"
            raise ValueError(f"{x_name} must have shape {expected}; got {x.shape}")
        if h is None:
            return x, None
        h = self._floating(h_name, h)
        if h.shape != (expected_h := (*x.shape[: -1 - time_axes], self.hidden_size)):
            raise ValueError(f"{h_name} must have shape {expected_h}; got {h.shape}")
        return x, h

    def _floating(self, name: str, value: ArrayLike) -> Array:
        try:
            array = np.asarray(value)
        except (RuntimeError, TypeError, ValueError) as error:  # ragged rows, or a tensor that NumPy cannot convert
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"{name} must be an array of a floating dtype; {error}") from None
        if array.dtype.kind != "f":
            raise TypeError(f"{name} must be of a floating dtype; got {array.dtype}")
        return array.astype(self.dtype, copy=False)

    def _assign(self, name: str, parameter: Tensor, value: ArrayLike) -> None:
        array = self._floating(name, value)
        if array.shape != tuple(parameter.shape):
            raise ValueError(f"{name} must have shape {tuple(parameter.shape)}; got {array.shape}")
        parameter.copy_(_tensor(array))


class _CellCPU(_Cell):
    """A cell on the CPU."""

    def _steps(self, x: Array, h: Array | None) -> Array:
        rows = 1 if x.ndim == 2 else len(x)
        inputs = _tensor(x).view(rows, *x.shape[-2:])
        state = None if h is None else _tensor(h).view(rows, self.hidden_size)
        layer: Any = self._layer
        weight, bias = layer.weight_ih_l0, layer.bias_ih_l0
        states = np.empty((rows, x.shape[-2], self.hidden_size), self.dtype)
        with _without_autocast():
            for t in range(x.shape[-2]):
                state = next_state(layer.cell, self.candidate, inputs[:, t], weight, bias, state)
                states[:, t] = state.numpy()
        return states.reshape(*x.shape[:-1], self.hidden_size)

    def _run(self, function: Callable[[Tensor, Tensor | None], Tensor], x: Array, h: Array | None) -> Array:
        with _without_autocast():
            return function(_tensor(x), None if h is None else _tensor(h[None])).numpy()


class _CellCUDA(_Cell):
    """A cell on the current GPU.  Data is copied through pinned memory on a stream of the cell's own."""

    def _choose_device(self) -> torch.device:
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"{type(self).__name__} needs a CUDA device and PyTorch finds none; "
                f"{type(self).__name__.removesuffix('CUDA')} computes the same on the CPU"
            )
        return torch.device("cuda", torch.cuda.current_device())

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def _steps(self, x: Array, h: Array | None) -> Array:
        def steps(x: Tensor, h: Tensor | None) -> Tensor:
            states = x.new_empty(*x.shape[:-1], self.hidden_size)
            for t in range(x.shape[-2]):
                y, h = self._layer.step(x.select(-2, t), h)
                states.select(-2, t).copy_(y)
            return states

        return self._run(steps, x, h)

    def _run(self, function: Callable[[Tensor, Tensor | None], Tensor], x: Array, h: Array | None) -> Array:
        with _without_autocast(), torch.cuda.stream(self._stream):
            states = function(self._to_device(x), None if h is None else self._to_device(h[None]))
            pinned = torch.empty(states.shape, dtype=states.dtype, device="cpu", pin_memory=True)
            pinned.copy_(states, non_blocking=True)
        self._stream.synchronize()
        return pinned.numpy().copy()  # pinned memory is scarce: the caller gets ordinary memory

    def _to_device(self, array: Array) -> Tensor:
        return _tensor(array).pin_memory().to(self._device, non_blocking=True)


def _tensor(array: Array) -> Tensor:
    """A tensor of the array's values, in the array's memory if that is contiguous and writable.

    Nothing writes to it here, but PyTorch warns of read-only memory.  A contiguous array may have a negative stride
    along an axis of length 1.
    """
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = np.require(array, requirements=["C", "W"])
    return torch.from_numpy(array.copy() if min(array.strides, default=0) < 0 else array)


def _read_only(parameter: Tensor) -> Array:
    """A copy of the values, read-only, as writing to it would not change the parameter."""
    array = parameter.numpy(force=True).copy()
    array.flags.writeable = False
    return array


class MinGRUCell(_CellCPU):
    r"""Minimal GRU on the CPU (section 3.1 of Feng et al. 2024, arXiv 2410.01201).

    .. math::
        z_t = \sigma(W_z x_t + b_z), \quad c_t = \phi(W_h x_t + b_h), \quad
        h_t = (1 - z_t) \odot h_{t-1} + z_t \odot c_t

    The sequential and the parallel form give the same states, those of :class:`ostinato.MinGRU`.

    Args:
        input_size: features of the input.
        hidden_size: features of the state.
        candidate: :math:`\phi`.  "linear", the identity, is the model of section 3.1; "positive" and "tanh" are as
            in :class:`ostinato.MinGRU`, whose default is "positive".
        dtype: float64 or float32; inputs are converted to it, weights and results have it.
        seed: for the initial weights, an integer or a ``numpy.random.Generator``.

    Attributes:
        weight: (2 * hidden_size, input_size), rows z then h, from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)).
        bias: (2 * hidden_size,), likewise.  Both are replaced by assignment: ``cell.bias = np.zeros(40)``.

    Raises:
        TypeError: a dtype that is neither float64 nor float32, sizes that are no integers.
        ValueError: sizes that are not positive, an unknown candidate.

    Example:
        >>> import numpy as np
        >>> from ostinato.numpy import MinGRUCell
        >>> cell, x_seq = MinGRUCell(input_size=10, hidden_size=20), np.random.random((5, 10))
        >>> h = cell.process_sequence(x_seq, np.zeros(20))
        >>> np.allclose(h, cell.process_sequence_parallel(x_seq, np.zeros(20)), rtol=0, atol=1e-12)
        True
        >>> np.allclose(h[0], cell.forward(x_seq[0]), rtol=0, atol=1e-12)
        True
    """

    _layer_type = MinGRU


class MinLSTMCell(_CellCPU):
    r"""Minimal LSTM on the CPU (section 3.2 of Feng et al. 2024, arXiv 2410.01201).

    .. math::
        f_t = \sigma(W_f x_t + b_f), \quad i_t = \sigma(W_i x_t + b_i), \quad c_t = \phi(W_h x_t + b_h), \quad
        h_t = \frac{f_t}{f_t + i_t} \odot h_{t-1} + \frac{i_t}{f_t + i_t} \odot c_t

    Arguments are :class:`MinGRUCell`'s; ``weight`` is (3 * hidden_size, input_size), rows f, i, h.

    Raises:
        TypeError, ValueError: as :class:`MinGRUCell`.

    Example:
        >>> import numpy as np
        >>> from ostinato.numpy import MinLSTMCell
        >>> MinLSTMCell(10, 20).process_sequence_parallel(np.random.random((5, 10))).shape
        (5, 20)
    """

    _layer_type = MinLSTM


class MinGRUCellCUDA(_CellCUDA):
    """:class:`MinGRUCell` on an NVIDIA GPU: the same model, arguments and results.

    Raises:
        RuntimeError: there is no CUDA device, which ``CUDA_AVAILABLE`` tells beforehand.
        TypeError, ValueError: as :class:`MinGRUCell`.

    Example:
        >>> import numpy as np
        >>> from ostinato.numpy import CUDA_AVAILABLE, MinGRUCell, MinGRUCellCUDA
        >>> cell = (MinGRUCellCUDA if CUDA_AVAILABLE else MinGRUCell)(input_size=10, hidden_size=20)
        >>> cell.process_sequence_parallel(np.random.random((5, 10)), np.zeros(20)).shape
        (5, 20)
    """

    _layer_type = MinGRU


class MinLSTMCellCUDA(_CellCUDA):
    """:class:`MinLSTMCell` on an NVIDIA GPU: the same model, arguments and results.

    Raises:
        RuntimeError, TypeError, ValueError: as :class:`MinGRUCellCUDA`.

    Example:
        >>> import numpy as np
        >>> from ostinato.numpy import CUDA_AVAILABLE, MinLSTMCell, MinLSTMCellCUDA
        >>> cell = (MinLSTMCellCUDA if CUDA_AVAILABLE else MinLSTMCell)(input_size=10, hidden_size=20)
        >>> cell.process_sequence_parallel(np.random.random((5, 10)), np.zeros(20)).shape
        (5, 20)
    """

    _layer_type = MinLSTM
