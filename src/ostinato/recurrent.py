"""RNN, GRU and LSTM: torch.nn's layers, dense or pruned, run by kernels of our own where no gradient is asked for."""

import functools
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ostinato.inference import Packed, Segment, tensors_of
from ostinato.kernels import dispatch
from ostinato.kernels.persistent.plan import Plan
from ostinato.masks import mask_name, mask_of, masked
from ostinato.optimizers import after_every_step
from ostinato.scan import check_batch_sizes

Hidden = Tensor | tuple[Tensor, Tensor]

# Kernels cannot be copied or saved, so they are kept beside the modules and not in them.
_packed: WeakKeyDictionary[nn.Module, Packed] = WeakKeyDictionary()


class _Recurrent(nn.RNNBase):
    """What ``torch.nn``'s layers lack: masks, and the choice of who computes the forward."""

    weight_hh_l0: Tensor

    def forward(self, input: Tensor | PackedSequence, hx: Hidden | None = None) -> tuple[Any, Any]:
        """Run the whole sequence; see the class."""
        packed = self._pack_for(input, hx)
        if packed is None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                _packed.pop(self, None)  # whatever comes of the gradients may change the weights
            names = self._flat_weights_names
            is_pruned = any(mask_of(self, name) is not None for name in names)
            return self._forward_torch(input, hx, [masked(self, name) for name in names] if is_pruned else None)
        plan = packed.plan(self._batch(input), self._dtype(input))
        if plan.path != "steps":
            try:
                return self._forward_kernels(input, hx, packed, plan)
            except FloatingPointError:  # torch tells how far a state that is not finite spreads
                pass
        return self._forward_torch(input, hx, list(packed.weights.values()) if self._buffers else None)

    def plan(self, batch: int, dtype: torch.dtype | None = None) -> Plan:
        """How a forward of ``batch`` sequences runs where no gradient is asked for.

        Args:
            batch: number of sequences.
            dtype: what is computed in; the parameters' if absent, which autocast overrides.

        Returns:
            ``path``, "dense", "sparse" or "block" for a kernel of our own and "steps" for torch's;
            ``bytes_on_chip`` of recurrent weights, of ``bytes_available``; ``blocks`` of threads; and the
            ``reason``.  It holds for all layers and directions.

        Raises:
            ValueError: a batch below 1.
            TypeError: a dtype that is none.

        Example:
            >>> import ostinato
            >>> ostinato.GRU(8, 16).plan(batch=1).reason  # on a CPU
            "dense layers run in torch's own kernels"
        """
        if batch < 1:
            raise ValueError(f"batch must be at least 1; got {batch}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype; got {dtype!r}")
        return self._pack(tensors_of(self)).plan(batch, dtype or self.weight_hh_l0.dtype)

    def flatten_parameters(self) -> None:
        """As ``torch.nn``'s; also forgets what the kernels have packed.

        They notice every change that PyTorch counts: an optimiser's step, ``load_state_dict``, an edit in place.
        Call this after one that it does not: through ``.data`` or a NumPy array.
        """
        _packed.pop(self, None)
        super().flatten_parameters()

    def _warn_unquantised(self, _: object) -> None:
        if self.mode in ("GRU", "LSTM"):  # torch.nn's RNN is left as it is too
            warnings.warn(
                f"torch.ao.quantization leaves ostinato's {type(self).__name__} as it is; to quantise its weights, "
                f"load them into a torch.nn.{self.mode} first, with strict=False",
                stacklevel=2,
            )

    # torch.ao.quantization sets one on every module, and passes over those whose very class it does not know.
    qconfig = property(None, _warn_unquantised)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Make room for the masks of a pruned layer, which a new one lacks."""
        for name in self._flat_weights_names:
            if "weight" in name and prefix + mask_name(name) in state_dict and mask_of(self, name) is None:
                self.register_buffer(mask_name(name), torch.ones_like(getattr(self, name), dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _pack(self, tensors: dict[str, Tensor]) -> Packed:
        after_every_step(_forget)
        packed = _packed.get(self)
        if packed is None or not packed.is_current(tensors):
            packed = _packed[self] = Packed(self, tensors)
        return packed

    def _pack_for(self, input: Tensor | PackedSequence, hx: Hidden | None) -> Packed | None:
        """The packed weights if a kernel may run this; None leaves it, and complaints about it, to torch."""
        device = self.weight_hh_l0.device
        data = input.data if isinstance(input, PackedSequence) else input
        runs_here = device.type == "cuda" or (device.type == "cpu" and bool(self._buffers))
        if not isinstance(data, Tensor) or not runs_here:
            return None
        states = _states(hx)
        own = tensors_of(self)
        tensors = [data, *states, *own.values()]
        rank = 3 if isinstance(input, PackedSequence) else data.dim()
        autocast = torch.is_autocast_enabled(device.type)
        fits = (
            rank in (2, 3)
            and data.numel() > 0
            and len(states) in (0, 2 if self.mode == "LSTM" else 1)
            and all(state.dim() == rank for state in states)
            and all(x.device == device for x in tensors)
            and (autocast or all(x.dtype == self.weight_hh_l0.dtype for x in (data, *states)))
            and not (autocast and (device.type == "cpu" or self.weight_hh_l0.dtype != torch.float32))
            and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
            and dispatch.is_eager(tensors)
        )
        return self._pack(own) if fits else None

    def _dtype(self, input: Tensor | PackedSequence) -> torch.dtype:
        """What a kernel computes in."""
        device = input.data.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.data.dtype

    def _batch(self, input: Tensor | PackedSequence) -> int:
        if isinstance(input, PackedSequence):
            check_batch_sizes(input.batch_sizes, len(input.data))
            return int(input.batch_sizes[0])
        return 1 if input.dim() == 2 else input.shape[0 if self.batch_first else 1]

    def _forward_kernels(
        self, input: Tensor | PackedSequence, hx: Hidden | None, packed: Packed, plan: Plan
    ) -> tuple[Any, Any]:
        """As ``torch.nn``'s forward, around :meth:`ostinato.inference.Packed.run`."""
        lstm, batch_dim = self.mode == "LSTM", 0 if self.batch_first else 1
        states = _states(hx)
        if isinstance(input, PackedSequence):
            x, batch_sizes, order, places = input
            segments, unbatched = _segments(batch_sizes), False
        else:
            unbatched, batch_sizes, order, places = input.dim() == 2, None, None, None
            x = input.unsqueeze(batch_dim) if unbatched else input
            segments = [(0, x.shape[1 - batch_dim], x.shape[batch_dim])]
        if unbatched:
            states = [state.unsqueeze(1) for state in states]
        if states:
            hidden: Any = tuple(states) if lstm else states[0]
            self.check_forward_args(x, hidden, batch_sizes)
        else:
            self.check_input(x, batch_sizes)
        if order is not None:
            states = [state.index_select(1, order) for state in states]
        if batch_sizes is None and self.batch_first:
            x = x.transpose(0, 1)

        rows = x.flatten(0, -2).to(self._dtype(input))
        output, states = packed.run(rows, states, segments, plan, self.dropout if self.training else 0.0)

        if places is not None:
            states = [state.index_select(1, places) for state in states]
        if batch_sizes is None:
            output = output.unflatten(0, segments[0][1:])
            output = output.transpose(0, 1) if self.batch_first else output
        if unbatched:
            output, states = output.squeeze(batch_dim), [state.squeeze(1) for state in states]
        hidden = tuple(states) if lstm else states[0]
        return (output if batch_sizes is None else PackedSequence(output, batch_sizes, order, places)), hidden

    def _forward_torch(
        self, input: Tensor | PackedSequence, hx: Hidden | None, weights: list[Tensor] | None
    ) -> tuple[Any, Any]:
        """``torch.nn``'s own forward, with other ``weights`` by a stand-in, as it reads them from the module."""
        module = self
        if weights is not None:
            if weights[0].is_cuda and not torch.compiler.is_compiling():
                _silence_copy_warning()
            module = object.__new__(type(self))
            module.__dict__.update(self.__dict__, _flat_weights=weights, _flat_weight_refs=[None] * len(weights))
        return super(_Recurrent, module).forward(input, hx)


def _forget(parameters: list[Tensor]) -> None:
    """What is packed of parameters that an optimiser has stepped: fused ones count no change of a tensor."""
    stepped = {id(parameter) for parameter in parameters}
    for reference in _packed.keyrefs():  # a copy, as other threads may be packing
        module = reference()
        if module is not None and any(id(parameter) in stepped for parameter in module.parameters(recurse=False)):
            _packed.pop(module, None)


@functools.cache
def _silence_copy_warning() -> None:
    """cuDNN copies weights that do not lie side by side at each call, as masked ones cannot help; torch would warn."""
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")


def _states(hx: Hidden | None) -> list[Tensor]:
    return [] if hx is None else [hx] if isinstance(hx, Tensor) else list(hx)


def _segments(batch_sizes: Tensor) -> list[Segment]:
    """The stretches of a PackedSequence in which no sequence ends."""
    sizes, counts = torch.unique_consecutive(batch_sizes, return_counts=True)
    segments, first = [], 0
    for batch, steps in zip(sizes.tolist(), counts.tolist(), strict=True):
        segments.append((first, steps, batch))
        first += batch * steps
    return segments


class RNN(_Recurrent, nn.RNN):
    r"""Stacked Elman layers, a drop-in for :class:`torch.nn.RNN` that can be pruned.

    .. math:: h_t = \phi(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh}), \quad \phi = \tanh \text{ or relu}

    Arguments, parameters, ``state_dict``, inputs, outputs and errors are :class:`torch.nn.RNN`'s, and so is the
    training.  Where no gradient is asked for, pruned layers on the CPU and all layers on an NVIDIA GPU run in
    kernels that keep the recurrent weights close to the processor for the whole sequence (Zhu et al. 2018,
    "Sparse Persistent RNNs", arXiv 1804.10223); :meth:`plan` tells.  See :func:`ostinato.prune`, which adds a
    buffer with the mask of each pruned weight, ``mask_hh_l{k}`` and ``mask_ih_l{k}``; ``load_state_dict`` makes
    them as needed.

    Example:
        >>> import torch, ostinato
        >>> trained = torch.nn.RNN(8, 16, nonlinearity="relu")
        >>> rnn = ostinato.RNN(8, 16, nonlinearity="relu")
        >>> rnn.load_state_dict(trained.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(100, 4, 8)
        >>> torch.allclose(rnn(x)[0], trained(x)[0], atol=1e-6)
        True
    """


class GRU(_Recurrent, nn.GRU):
    r"""Stacked gated recurrent units, a drop-in for :class:`torch.nn.GRU` that can be pruned; see :class:`RNN`.

    .. math::
        r_t = \sigma(W_{ir} x_t + b_{ir} + W_{hr} h_{t-1} + b_{hr}), \quad
        z_t = \sigma(W_{iz} x_t + b_{iz} + W_{hz} h_{t-1} + b_{hz})

        n_t = \tanh(W_{in} x_t + b_{in} + r_t \odot (W_{hn} h_{t-1} + b_{hn})), \quad
        h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}

    Example:
        >>> import torch, ostinato
        >>> gru = ostinato.GRU(8, 16, num_layers=2, batch_first=True)
        >>> output, h_n = gru(torch.randn(4, 100, 8))
        >>> output.shape, h_n.shape
        (torch.Size([4, 100, 16]), torch.Size([2, 4, 16]))
    """


class LSTM(_Recurrent, nn.LSTM):
    r"""Stacked LSTM layers, a drop-in for :class:`torch.nn.LSTM` that can be pruned; see :class:`RNN`.

    .. math::
        i_t, f_t, o_t = \sigma(W_i x_t + b_i + W_h h_{t-1} + b_h), \quad
        g_t = \tanh(W_{ig} x_t + b_{ig} + W_{hg} h_{t-1} + b_{hg})

        c_t = f_t \odot c_{t-1} + i_t \odot g_t, \quad h_t = o_t \odot \tanh(c_t)

    Raises:
        ValueError: ``proj_size`` above 0, which has no kernels here.

    Example:
        >>> import torch, ostinato
        >>> lstm = ostinato.LSTM(8, 16, bidirectional=True)
        >>> output, (h_n, c_n) = lstm(torch.randn(100, 4, 8))
        >>> output.shape, c_n.shape
        (torch.Size([100, 4, 32]), torch.Size([2, 4, 16]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.proj_size:
            raise ValueError(f"proj_size must be 0, projections are not supported; got {self.proj_size}")
