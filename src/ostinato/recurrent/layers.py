"""RNN, GRU and LSTM: ``torch.nn``'s interface, and the choice of what computes a call."""

import functools
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._subclasses import FakeTensor
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.utils.rnn import PackedSequence

from ostinato.checks import check_flags, check_integers, check_resets
from ostinato.kernels.matmul.precision import autocast_dtype
from ostinato.kernels.operators.export import is_traced, node_of, proxy_among
from ostinato.kernels.persistent.backends import least_steps
from ostinato.kernels.persistent.modes import is_vmapped
from ostinato.kernels.persistent.plan import Plan, no_kernel
from ostinato.layers import LayerCall
from ostinato.recurrent.exported import forward_exported
from ostinato.recurrent.scripting import OneState, ScriptedLayers, TwoStates
from ostinato.recurrent.sequences import LEFT_TO_TORCH, SequenceLayers
from ostinato.recurrent.steps import StepLayers, recorded
from ostinato.recurrent.torch_layers import check_hidden
from ostinato.recurrent.weights import unmasked_weights, weights_of
from ostinato.replay import recording
from ostinato.states import State, hidden_of, states_of


def _without_qconfig(layer: nn.RNNBase) -> None:
    raise AttributeError(f"{type(layer).__name__} has no qconfig")


def _warn_unquantised(layer: nn.RNNBase, _: object) -> None:
    if layer.mode in ("GRU", "LSTM"):  # torch.nn's RNN is not quantised either
        warnings.warn(
            f"torch.ao.quantization leaves ostinato's {type(layer).__name__} as it is; to quantise its weights, "
            f"load them into a torch.nn.{layer.mode} first, with strict=False",
            stacklevel=2,
        )


class _Recurrent(ScriptedLayers, SequenceLayers, StepLayers[State]):
    """Adds resets, and the choice of what computes a call, to ``torch.nn``'s layers."""

    __call__: LayerCall[State]

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None, *, resets: Tensor | None = None
    ) -> tuple[Any, Any]:
        """Run the whole sequence; see the class."""
        if torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling() and not torch._dynamo.config.allow_rnn:  # tried from 2.15 on
                torch._dynamo.skip_frame(msg="RNN, GRU and LSTM compile with torch._dynamo.config.allow_rnn = True")
        elif get_eval_frame_callback():
            return _uncompiled()(self, input, hx, resets=resets)
        elif is_fx_symbolic_tracing() and (proxy := proxy_among(input, hx, resets)) is not None:
            return node_of(self, _Recurrent.forward, proxy.tracer, input, hx=hx, resets=resets)
        _check_types(input, hx, self.mode == "LSTM")
        steps = input.shape[_time_of(self, input)] if isinstance(input, Tensor) and input.dim() > 1 else None
        if resets is not None:
            check_resets(resets, "input", input.data if isinstance(input, PackedSequence) else input)
            if steps == 1:
                hx, resets = _reset_state(self, hx, resets.flatten()), None
        if (
            resets is None
            and steps is not None
            and not torch.compiler.is_compiling()
            and (result := self._forward_of_few_steps(input, hx, steps)) is not None
        ):
            return result
        states, unmasked = states_of(hx), unmasked_weights(self)
        call = self._kernels_for(input, states, unmasked, resets)
        if call is LEFT_TO_TORCH:
            return self._call_torch(cast(Tensor, input), hidden_of(states), unmasked)
        if call is not None:
            return self._run_kernels(input, states, unmasked, resets, call)
        if steps == 0:
            return self._forward_of_no_steps(input, hx)
        weights = weights_of(self)
        is_sequence = isinstance(input, PackedSequence) or input.dim() in (2, 3)  # torch refuses others
        if is_traced() and is_sequence and (self.proj_size or resets is not None):
            return forward_exported(self, input, states, weights, resets)
        # Without rows there are no episodes, and shapes, all that tensors without data have, do not depend on them.
        if resets is None or not resets.numel() or resets.is_meta or isinstance(resets, FakeTensor):
            return self._forward_torch(input, hx, weights)
        return self._forward_torch_by_episodes(input, hx, weights, resets)

    forward.__qualname__ = "forward"  # Python's errors then do not name a private class
    _own_forward = forward

    def plan(
        self,
        batch: int,
        dtype: torch.dtype | None = None,
        *,
        training: bool = False,
        steps: int | None = None,
        resets: bool = False,
        packed: bool = False,
    ) -> Plan:
        """How a call with ``batch`` sequences runs.

        Args:
            batch: number of sequences.
            dtype: the compute dtype, which under autocast is autocast's; the parameters' if absent.
            training: whether gradients will be computed; in training mode, calls with dropout between layers always run
                as if they were.
            steps: the steps of the longest sequence; many if absent.
            resets: whether the call has resets.
            packed: whether the sequences are packed, and differ in length.

        Returns:
            ``path``, "dense", "sparse" or "block" for a persistent kernel, and "steps" for torch's kernels or, on a GPU
            with few sequences, the kernel of a single step; ``has_kernel``, whether it is a persistent kernel;
            ``bytes_on_chip``, of recurrent weights, out of ``bytes_available``; ``blocks``, the number of thread
            blocks; ``at_once``, how many stacked layers or directions run at the same time, though directions take
            turns on a CPU, or where a GPU has no room for both; ``directions``, how many one launch runs; and the
            ``reason``.  If any layer or direction needs torch's kernels, all use them; otherwise this is the plan of
            the largest one.

        Raises:
            ValueError: ``batch`` or ``steps`` below 1.
            TypeError: a dtype that is not floating point; ``batch`` or ``steps`` that is not an integer; ``training``,
                ``resets`` or ``packed`` that is not a bool.

        Example:
            >>> import torch, ostinato
            >>> ostinato.GRU(8, 16).plan(batch=1, dtype=torch.float16, training=True).path  # on a CPU
            'steps'
        """
        check_integers(1, batch=batch, steps=1 if steps is None else steps)
        check_flags(training=training, resets=resets, packed=packed)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating-point torch.dtype; got {dtype!r}")
        weight = self.weight_hh_l0
        try:
            return self._plan_call(weight.device, batch, dtype or weight.dtype, training, steps, resets, packed)
        except RuntimeError as error:
            return no_kernel(str(error).partition("\n")[0])

    plan.__qualname__ = "plan"

    # torch.ao.quantization sets a qconfig on every module, and skips those whose exact class it does not know.
    qconfig = property(_without_qconfig, _warn_unquantised)

    def _forward_of_few_steps(self, input: Any, hx: Any, steps: int) -> tuple[Tensor, Any] | None:
        """A short sequence by single steps, or by torch's kernels where it is too short for ours; None for others.

        None also for two or three steps that may be replayed from CUDA graphs, as our kernels then are.
        """
        if steps == 1:
            if (recorder := recording()) is not None:
                return recorded(self, recorder, _Recurrent.forward, input, hx)
            if (result := self._fast_step(input, hx, input.dim() - 1)) is not None:
                return result
        elif (result := self._forward_single_steps(input, hx, _time_of(self, input))) is not None:
            return result
        dtype = autocast_dtype(input.device) or input.dtype
        batch = input.shape[1 - _time_of(self, input)] if input.dim() == 3 else 1
        of_layer = self.mode.lower(), self.hidden_size, batch, dtype, self.bidirectional
        least = least_steps(input.device.type, *of_layer)
        if not 0 < steps < least or is_vmapped():
            return None
        weights = weights_of(self)
        may_be_replayed = steps > 1 and self._may_be_replayed(weights, batch, steps)
        return None if may_be_replayed else self._forward_torch(input, hx, weights)

    def _forward_of_no_steps(self, input: Any, hx: Any) -> tuple[Tensor, Any]:
        """An empty output and the unchanged state, checked as for a step of zeros, as torch refuses empty sequences."""
        time, shape = _time_of(self, input), list(input.shape)
        shape[time] = 1
        output, last = self._own_forward(input.new_zeros(shape), hx)
        initial: Any = states_of(hx) or (0.0, 0.0)
        never = torch.zeros((), dtype=torch.bool, device=input.device)
        states = [after.where(never, before) for after, before in zip(states_of(last), initial, strict=False)]
        return output.narrow(time, 0, 0), hidden_of(states)


def _time_of(layer: nn.RNNBase, x: Tensor) -> int:
    """The dimension of time."""
    return 1 if layer.batch_first and x.dim() == 3 else 0


def _reset_state(layer: nn.RNNBase, hx: Any, resets: Tensor) -> Any:
    """The state before a single step, zero where that is reset; not in reverse, where it is that of a later step."""
    if hx is None:
        return None
    if not isinstance(hx, Tensor):
        return tuple(_reset_state(layer, state, resets) for state in hx)
    if hx.dim() == 3 and hx.shape[1] != len(resets):
        return hx  # torch raises
    keep = ~resets[:, None] if hx.dim() == 3 else ~resets
    if not layer.bidirectional:
        return hx.where(keep, 0.0)
    return torch.stack([hx[0::2].where(keep, 0.0), hx[1::2]], 1).flatten(0, 1)


@functools.cache
def _uncompiled() -> Any:
    """The forward for a compiled model that leaves the layer uncompiled.

    PyTorch's compiler is still active then.  It would compile each function that the forward calls separately, and as
    each would see that it is being compiled, none would use a kernel.  Nor does ``step``, which calls the forward.
    """
    return torch.compiler.disable(_Recurrent.forward)


def _check_types(input: Any, hx: Any, lstm: bool) -> None:
    """Raise TypeError for objects without the attributes that ``torch.nn`` would read."""
    if not isinstance(input, (Tensor, PackedSequence)):
        raise TypeError(f"input must be a tensor or a PackedSequence; got {type(input).__name__}")
    if isinstance(input, Tensor) and input.is_nested:
        raise TypeError("input must be dense or packed; got a nested tensor, which pack_sequence(input.unbind()) packs")
    check_hidden("hx", hx, lstm)


class RNN(_Recurrent[Tensor], OneState, nn.RNN):
    r"""Stacked Elman layers, a drop-in for :class:`torch.nn.RNN` that can be pruned.

    .. math:: h_t = \phi(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh}), \quad \phi = \tanh \text{ or relu}

    Arguments, parameters, ``state_dict``, inputs, outputs, gradients and errors are :class:`torch.nn.RNN`'s, but for a
    sequence without steps, which it refuses, and which leaves the state unchanged here.  On CPUs and NVIDIA GPUs layers
    run and train in kernels that keep the recurrent weights on chip or in cache for the whole sequence (Zhu et al.
    2018, "Sparse Persistent RNNs", arXiv 1804.10223), where one fits; see :meth:`plan`.  The parameters are read at
    every call.  In float32 on a GPU, products may be rounded to tf32 if ``torch.backends.cudnn.rnn.fp32_precision``
    says so, as it does by default for :class:`torch.nn.RNN` too.  See :func:`ostinato.prune`, which adds a buffer with
    the mask of each pruned weight, ``mask_hh_l{k}`` and ``mask_ih_l{k}``; ``load_state_dict`` creates them as needed.
    ``torch.jit.script`` compiles calls without ``resets``, to :class:`torch.nn.RNN`'s kernels.

    Episodes that end inside a sequence: ``forward(input, hx=None, *, resets=None)`` takes a bool tensor of the input's
    shape without features: (T, B), (B, T) with ``batch_first``, (T,) unbatched, or (rows,) for the data of a
    PackedSequence.  Where it is True, an episode begins with that step: the state before the step, including an LSTM's
    c, is zero, and neither states nor gradients flow between the step and the previous one, in either direction of a
    bidirectional layer.  True at the first step means that ``hx`` is ignored.

    Raises:
        TypeError: ``resets`` that are not a bool tensor.
        ValueError: ``resets`` of another shape or on another device than the input.

    Example:
        >>> import torch, ostinato
        >>> trained = torch.nn.RNN(8, 16, nonlinearity="relu")
        >>> rnn = ostinato.RNN(8, 16, nonlinearity="relu")
        >>> rnn.load_state_dict(trained.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(100, 4, 8)
        >>> torch.allclose(rnn(x)[0], trained(x)[0], atol=1e-6)
        True
        >>> resets = torch.arange(100).eq(60)[:, None].expand(100, 4)  # in all sequences, before step 60
        >>> torch.allclose(rnn(x, resets=resets)[0][60:], trained(x[60:])[0], atol=1e-6)
        True
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional
        super().__init__(*sizes, device=device, dtype=dtype)


class GRU(_Recurrent[Tensor], OneState, nn.GRU):
    r"""Stacked gated recurrent units, a drop-in for :class:`torch.nn.GRU` that can be pruned; see :class:`RNN`.

    .. math::
        r_t = \sigma(W_{ir} x_t + b_{ir} + W_{hr} h_{t-1} + b_{hr}), \quad
        z_t = \sigma(W_{iz} x_t + b_{iz} + W_{hz} h_{t-1} + b_{hz})

        n_t = \tanh(W_{in} x_t + b_{in} + r_t \odot (W_{hn} h_{t-1} + b_{hn})), \quad
        h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}

    Raises:
        TypeError, ValueError: as :class:`RNN`.

    Example:
        >>> import torch, ostinato
        >>> gru = ostinato.GRU(8, 16, num_layers=2, batch_first=True)
        >>> output, h_n = gru(torch.randn(4, 100, 8))
        >>> output.shape, h_n.shape
        (torch.Size([4, 100, 16]), torch.Size([2, 4, 16]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(*sizes, device=device, dtype=dtype)


class LSTM(_Recurrent[tuple[Tensor, Tensor]], TwoStates, nn.LSTM):
    r"""Stacked LSTM layers, a drop-in for :class:`torch.nn.LSTM` that can be pruned; see :class:`RNN`.

    .. math::
        i_t, f_t, o_t = \sigma(W_i x_t + b_i + W_h h_{t-1} + b_h), \quad
        g_t = \tanh(W_{ig} x_t + b_{ig} + W_{hg} h_{t-1} + b_{hg})

        c_t = f_t \odot c_{t-1} + i_t \odot g_t, \quad h_t = o_t \odot \tanh(c_t)

    With ``proj_size``, :math:`h_t = W_{hr} (o_t \odot \tanh(c_t))`; such a layer cannot be pruned.

    Raises:
        TypeError, ValueError: as :class:`RNN`.

    Example:
        >>> import torch, ostinato
        >>> lstm = ostinato.LSTM(8, 16, bidirectional=True)
        >>> output, (h_n, c_n) = lstm(torch.randn(100, 4, 8))
        >>> output.shape, c_n.shape
        (torch.Size([100, 4, 32]), torch.Size([2, 4, 16]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size
        super().__init__(*sizes, device=device, dtype=dtype)
