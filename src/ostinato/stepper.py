"""Streaming inference: one time step per call, with the state kept inside."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ostinato.checks import check_flags, check_integers, check_tensor, describe
from ostinato.cuda_graphs.capture import capture
from ostinato.minimal import MinGRUCell, MinLSTMCell
from ostinato.recurrent import GRU, LSTM, RNN
from ostinato.recurrent.steps import freeze
from ostinato.replay import Recorder, Unrepeatable


def _outside_inference_mode(function: Callable) -> Callable:
    """Run without gradients, but outside of inference mode, whose tensors could not be written to after its end."""
    return torch.inference_mode(False)(torch.no_grad()(function))


class Stepper:
    """Runs a module one time step per call and keeps its state: ``y = stepper(x)``.

    On a GPU a step is captured in a CUDA graph and replayed, since launching its kernels takes longer than running
    them.  On a CPU the operator calls of a frozen module's first step are recorded and replayed likewise.  Otherwise a
    step calls ``module.step``.  No gradients are computed.

    Args:
        module: RNN, GRU, LSTM, MinGRU or MinLSTM; a :class:`ostinato.models.LanguageModel`, whose inputs are tokens;
            any module with ``y, state = module.step(x, state)`` and ``state = module.initial_state(batch_size)``, a
            tensor or tuples and lists of them, each with a dimension of sequences; or a ``torch.nn.Sequential`` of such
            modules and stateless ones, without recurrent layers inside.  y is a tensor, or tuples, lists and dicts of
            them, such as an actor's logits and a critic's value.  In-place updates of weights, such as an optimiser's,
            take effect at the next step.  A graph is captured at the first step; after a change of ``module.training``
            or a replacement of parameters make a new stepper.
        batch_size: the number of sequences, B.
        frozen: copy the module and keep its weights constant.  On CPUs the nonzero weights of pruned layers are then
            packed once, and PyTorch's operators are called without the module's Python code in between: that runs only
            once, along with its branches and NumPy calls (on anything but tensor values) and attribute assignments.

    Raises:
        TypeError: a module without ``step`` and ``initial_state``, or whose step does not return a pair; a
            ``batch_size`` that is not an integer, ``frozen`` that is not a bool; an input that is not a tensor, a state
            that is not made of tensors, or a mask that is not a bool tensor; where steps are replayed, an input of
            another dtype than the first, or an output that is not made of tensors.
        ValueError: a ``batch_size`` below 1, a bidirectional layer, an initial state without a dimension of sequences,
            an input without a row for each sequence or, where steps are replayed, of another shape than the first, a
            state of other shapes, or a mask that is not (B,).

    Example:
        >>> import torch, ostinato
        >>> policy = torch.nn.Sequential(torch.nn.Linear(3, 8), ostinato.GRU(8, 16), torch.nn.Linear(16, 2))
        >>> stepper = ostinato.Stepper(policy, batch_size=4)
        >>> x = torch.randn(4, 3)
        >>> first = stepper(x)  # (4, 2)
        >>> torch.equal(first, stepper(x))  # the state is no longer zero
        False
        >>> stepper.reset(torch.tensor([True, False, False, True]))  # these two start again
        >>> torch.equal(first[0], stepper(x)[0])
        True
    """

    @_outside_inference_mode
    def __init__(self, module: nn.Module, batch_size: int, *, frozen: bool = False) -> None:
        check_integers(1, batch_size=batch_size)
        check_flags(frozen=frozen)
        if frozen:
            module = copy.deepcopy(module)
            for layer in module.modules():
                if isinstance(layer, RNN | GRU | LSTM):
                    freeze(layer)
        self._module, self.batch_size = module, batch_size
        self._first = _initial_state(module, batch_size)
        more = _initial_state(module, batch_size + 1)
        self._batch_dims = [_batch_dim(*pair) for pair in zip(_tensors(self._first), _tensors(more), strict=True)]
        self._state = _map_state(Tensor.clone, self._first)
        self._replay: Callable[[Tensor], Any] | None = None
        self._records = frozen  # whether to record a step on a CPU

    def __repr__(self) -> str:
        return f"Stepper({self._module!r}, batch_size={self.batch_size})"

    def __call__(self, x: Tensor) -> Any:
        """The module's output at this step, from its input (B, ...)."""
        return self._without_replay(x) if self._replay is None else self._replay(x)

    @torch.no_grad()
    def _without_replay(self, x: Tensor) -> Any:
        """A step while there is nothing to replay; where possible it is first captured or recorded."""
        check_tensor("x", x)
        if x.dim() == 0 or x.shape[0] != self.batch_size:
            raise ValueError(f"x must have {self.batch_size} rows, one a sequence; got {tuple(x.shape)}")
        if x.is_cuda or (x.is_cpu and self._records):
            self._replay = self._captured(x) if x.is_cuda else self._recorded(x)
        if self._replay is not None:
            return self._replay(x)
        self._records = False
        y, after = _step(self._module, x, self._state)
        if torch._C._is_any_autocast_enabled():  # the next step may be outside of it
            dtypes = iter([x.dtype for x in _tensors(self._state)])
            after = _map_state(lambda x: x.to(next(dtypes, x.dtype)), after)
        self._state = _map_state(Tensor.clone, after)  # it may alias the output or the input, which are the caller's
        return y

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the replay: a copy captures or records a step of its own."""
        return {**self.__dict__, "_replay": None}

    @property
    def state(self) -> Any:
        """A copy of the state after the last step, as ``module.step`` returns it; assignment copies, too."""
        return _map_state(Tensor.clone, self._state)

    @state.setter
    @torch.inference_mode()  # in which the state may have been made
    def state(self, value: Any) -> None:
        current, new = list(_tensors(self._state)), list(_tensors(value))
        if [x.shape for x in current] != [x.shape for x in new]:
            raise ValueError(f"state must have the shapes {_shapes(current)}; got {_shapes(new)}")
        for target, source in zip(current, new, strict=True):
            target.copy_(source)

    @torch.inference_mode()
    def reset(self, mask: Tensor | None = None) -> None:
        """Restore the initial state of all sequences, or of those where the mask (B,) is True.

        Raises:
            TypeError: a mask that is not a bool tensor.
            ValueError: one that is not (B,).

        Example:
            >>> import torch, ostinato
            >>> stepper, x = ostinato.Stepper(ostinato.GRU(3, 5), batch_size=2), torch.randn(2, 3)
            >>> first, second = stepper(x), stepper(x)
            >>> stepper.reset()
            >>> torch.equal(stepper(x), first)
            True
        """
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                raise TypeError(f"mask must be a bool tensor; got {describe(mask)}")
            if mask.shape != (self.batch_size,):
                raise ValueError(f"mask must have shape {(self.batch_size,)}; got {tuple(mask.shape)}")
        for current, first, dim in zip(_tensors(self._state), _tensors(self._first), self._batch_dims, strict=True):
            if mask is None:
                current.copy_(first)
            else:
                at = mask.to(current.device).view(*(-1 if i == dim else 1 for i in range(current.dim())))
                current.copy_(torch.where(at, first, current))

    @_outside_inference_mode
    def _captured(self, x: Tensor) -> Callable[[Tensor], Any]:
        """Capture a step in a CUDA graph, which reads and writes the same memory at every replay."""
        static_x, module, state = x.clone(), self._module, self._state
        with _unchanged((*_tensors(state), *module.buffers())):
            replay, y = capture(lambda: _advance(module, static_x, state), x.device)
        _check_output(module, y)
        return functools.partial(_replay, replay, static_x, (static_x.shape, static_x.dtype), y)

    @_outside_inference_mode
    def _recorded(self, x: Tensor) -> Callable[[Tensor], Any] | None:
        """Record a step on a CPU, to replay it likewise; None for a module that branches on tensor values."""
        static_x, module, state, recorder = x.clone(), self._module, self._state, Recorder()
        with _unchanged((*_tensors(state), *module.buffers())):
            _advance(module, static_x, state)  # warm-up: compiles kernels and packs weights
            try:
                with recorder:
                    y = _advance(module, static_x, state)
            except Unrepeatable:
                return None
        _check_output(module, y)
        return functools.partial(_replay, recorder.repeat, static_x, (static_x.shape, static_x.dtype), y)


@contextmanager
def _unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the tensors' contents on exit."""
    before = [(x, x.clone()) for x in tensors]
    try:
        yield
    finally:
        for x, old in before:
            if not torch.equal(x, old):  # writing to a mask would invalidate weights packed by it
                x.copy_(old)


def _replay(replay: Callable[[], None], static_x: Tensor, expected: tuple, y: Any, x: Tensor) -> Any:
    """Copy x into the memory that the replay reads, replay, and return a copy of the output."""
    check_tensor("x", x)
    if (x.shape, x.dtype) != expected:
        kind = ValueError if x.dtype is static_x.dtype else TypeError
        first, got = (f"{tuple(each.shape)} of {each.dtype}" for each in (static_x, x))
        raise kind(f"x must be as at the first step, {first}; got {got}")
    static_x.copy_(x.detach() if x.requires_grad else x)
    replay()
    return _map_output(Tensor.clone, y)


def _initial_state(module: Any, batch_size: int) -> Any:
    if _is_stepped_by_parts(module):
        return [None if _is_stateless(part) else _initial_state(part, batch_size) for part in module]
    if not (_has_step(module) and hasattr(module, "initial_state")):
        by = ", to which ostinato.convert gives them" if isinstance(module, nn.RNN | nn.GRU | nn.LSTM) else ""
        raise TypeError(
            "module must have y, state = step(x, state) and state = initial_state(batch_size); got "
            f"{type(module).__module__}.{type(module).__name__}{by}"
        )
    if getattr(module, "bidirectional", False):
        raise ValueError(f"module must run forward in time; got a bidirectional {type(module).__name__}")
    return module.initial_state(batch_size)


def _is_stepped_by_parts(module: Any) -> bool:
    """Whether it is a plain Sequential: no subclass with its own forward, such as a residual block's, or step."""
    sequential = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return sequential and not _has_step(module)


def _is_stateless(part: nn.Module) -> bool:
    """Whether a part needs no state and can be called; a recurrent layer inside it would restart at every step."""
    stateful = nn.RNNBase, nn.RNNCellBase, MinGRUCell, MinLSTMCell
    return not _is_stepped_by_parts(part) and not any(
        _has_step(module) or isinstance(module, stateful) for module in part.modules()
    )


def _has_step(module: Any) -> bool:
    """Whether it has a function ``step``, not a counter or a submodule of that name."""
    step = getattr(module, "step", None)
    return callable(step) and not isinstance(step, nn.Module)


def _batch_dim(state: Tensor, larger: Tensor) -> int:
    """The dimension in which the states of two batch sizes differ."""
    dims = [i for i, (n, m) in enumerate(zip(state.shape, larger.shape, strict=True)) if n != m]
    if not dims:
        raise ValueError(f"initial_state must return tensors with a row for each sequence; got {_shapes([state])}")
    return dims[0]


def _step(module: Any, x: Any, state: Any) -> tuple[Any, Any]:
    """The output and the next state of a module, or of the parts of a plain Sequential in turn."""
    if not _is_stepped_by_parts(module):
        result = module.step(x, state)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            got = f"{len(result)} values" if isinstance(result, (tuple, list)) else describe(result)
            raise TypeError(f"{type(module).__name__}.step must return its output and the next state; got {got}")
        return result[0], result[1]
    parts: Any = module
    after = []
    for part, before in zip(parts, state, strict=True):
        x, new = (part(x), None) if before is None else _step(part, x, before)
        x = _unaliased(x, new)  # the next part may work in place
        after.append(new)
    return x, after


def _advance(module: Any, x: Tensor, state: Any) -> Any:
    """Run a step in place: writes the next state into the memory of the state, and returns the output."""
    y, after = _step(module, x, state)
    # The output and new states may alias states: copy them before any is overwritten.
    y, new = _unaliased(y, state), [_unaliased(value, state) for value in _tensors(after)]
    for target, value in zip(_tensors(state), new, strict=True):
        target.copy_(value)
    return y


def _unaliased(x: Any, state: Any) -> Any:
    """The output, with copies of its tensors that share memory with a tensor of the state."""
    memory = {y.untyped_storage().data_ptr() for y in _tensors(state)}
    return _map_output(lambda y: y.clone() if y.untyped_storage().data_ptr() in memory else y, x)


def _check_output(module: Any, y: Any) -> None:
    """Raise TypeError for an output with a part that cannot be copied: it would change with the next step."""
    for part in tree_leaves(y):
        if not isinstance(part, Tensor | bool | int | float | str | None):
            kinds = "made of tensors, in tuples, lists and dicts"
            raise TypeError(f"{type(module).__name__}.step's output must be {kinds}; got {describe(part)}")


def _map_output(function: Callable[[Tensor], Tensor], y: Any) -> Any:
    """Apply the function to an output's tensors, in any container that PyTorch looks into."""
    return function(y) if isinstance(y, Tensor) else tree_map_only(Tensor, function, y)


def _tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, in order."""
    if isinstance(state, (tuple, list)):
        for part in state:
            yield from _tensors(part)
    elif state is not None:
        if not isinstance(state, Tensor):
            raise TypeError(f"state must be made of tensors, in tuples and lists; got {type(state).__name__}")
        yield state


def _map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Apply the function to a state's tensors, in tuples and lists of any class."""
    if isinstance(state, Tensor):
        return function(state)
    if state is None:
        return None
    parts = [_map_state(function, part) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors) or "no tensor"
