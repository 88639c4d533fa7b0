"""Counts calls, captures those that repeat, and bounds the memory that all their graphs keep."""

import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

USES = 16  # equal calls before they are captured: more than the usual warm-up of a capture around them
MOST_KEPT = 512 << 20  # bytes, of all graphs together
_FREE_PER_BYTE = 8  # bytes of a GPU's memory that must be free for each that is captured: others use that memory, too
_STALE = 4096  # replays since its own last one, after which a graph may be freed to make room
_MOST_COUNTED = 512  # calls of the same sizes, such as those of equal layers: graphs of more would find no room


class KeptGraphs:
    """Graphs with memory of their own."""

    bytes = 0  # of memory, including that for what is yet to be captured, such as the backward
    last_replay = 0  # its number among the replays of all graphs

    def count_replay(self) -> None:
        """Number a replay, so that the least recently used graphs can be found."""
        _kept.replays += 1
        self.last_replay = _kept.replays

    def give_up(self) -> None:
        """Free these graphs, and launch their call from now on."""
        _kept.give_up(_is_of(self))


G = TypeVar("G", bound=KeptGraphs)


class Repeated(Generic[G]):
    """Calls of the same sizes, by key: how often each was made, then its graphs, or None if they were given up."""

    def __init__(self) -> None:
        self.calls: dict[tuple[Hashable, ...], int | G | None] = {}

    def find_or_capture(
        self,
        key: tuple[Hashable, ...],
        capture: Callable[[], G],
        bytes_needed: int,
        device: torch.device,
        owner: nn.Module | nn.Parameter,
    ) -> G | None:
        """The graphs of a call, captured once it has been made often enough; None if it has none.

        It never has any if its capture raises a RuntimeError, or if there is no room for them beside other graphs and
        whatever else the GPU's memory holds.  The key begins with the addresses of the weights.  Graphs keep their
        weights in memory, so they are freed with their owner, the layer or a parameter of it, or when the owner has
        other weights.
        """
        entry = self.calls.get(key, 0)
        if type(entry) is not int:
            return entry  # type: ignore[return-value]
        if entry < USES:
            if not entry and len(self.calls) >= _MOST_COUNTED:
                for counted, uses in list(self.calls.items()):
                    if type(uses) is int:
                        self.calls.pop(counted, None)
            self.calls[key] = entry + 1
            return None
        self.calls[key] = None  # so that other threads launch meanwhile
        if _FREE_PER_BYTE * bytes_needed <= torch.cuda.mem_get_info(device)[0] and _kept.make_room(bytes_needed):
            with suppress(RuntimeError):
                self.calls[key] = graphs = capture()
                graphs.bytes = max(graphs.bytes, bytes_needed)
                _kept.add(graphs, self.calls, key, owner)
                return graphs
        return None


class _Kept(NamedTuple):
    """Graphs, and the entry of :class:`Repeated` that holds them."""

    graphs: KeptGraphs
    calls: dict[tuple[Hashable, ...], Any]
    key: tuple[Hashable, ...]
    owner: Callable[[], Any]


def _is_of(graphs: KeptGraphs) -> Callable[[_Kept], bool]:
    return lambda kept: kept.graphs is graphs


class _AllKept:
    """All graphs, whose memory is bounded."""

    def __init__(self) -> None:
        self.replays, self._all = 0, list[_Kept]()

    def drop(self, matches: Callable[[_Kept], bool]) -> list[_Kept]:
        """Free and return the graphs that match; their calls are counted from zero again."""
        dropped = [*filter(matches, self._all[:])]
        for kept in dropped:
            with suppress(ValueError):  # another thread or the garbage collector came first
                self._all.remove(kept)
            kept.calls.pop(kept.key, None)
        return dropped

    def give_up(self, matches: Callable[[_Kept], bool]) -> None:
        """Free the graphs that match, and launch their calls from now on."""
        for kept in self.drop(matches):
            kept.calls[kept.key] = None

    def make_room(self, bytes_needed: int) -> bool:
        """Whether so many bytes fit within the bound, once graphs that have not been replayed for long are freed."""
        if bytes_needed > MOST_KEPT:
            return False
        while (all_kept := self._all[:]) and sum(kept.graphs.bytes for kept in all_kept) + bytes_needed > MOST_KEPT:
            oldest = min(all_kept, key=lambda kept: kept.graphs.last_replay)
            if self.replays - oldest.graphs.last_replay < _STALE:
                return False
            self.drop(_is_of(oldest.graphs))
        return True

    def add(
        self,
        graphs: KeptGraphs,
        calls: dict[tuple[Hashable, ...], Any],
        key: tuple[Hashable, ...],
        owner: nn.Module | nn.Parameter,
    ) -> None:
        """Register new graphs in place of those of the owner's former weights, which they would keep in memory."""
        for kept in self._all[:]:
            if kept.owner() is owner and kept.key[0] != key[0]:  # the addresses of the weights
                self.give_up(_is_of(kept.graphs))
        self._all.append(_Kept(graphs, calls, key, weakref.ref(owner, lambda _: self.drop(_is_of(graphs)))))


_kept = _AllKept()


class FreesGraphs(nn.Module):
    """A layer whose graphs, which keep its weights in memory, are freed when these are moved or replaced."""

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        forget(self)
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            # Given up, not dropped: former parameters may come back, as FSDP2's do at every call, and would be captured
            # again and again.
            _kept.give_up(_is_owned_by(self))
        super().__setattr__(name, value)


def forget(layer: nn.Module) -> None:
    """Free the graphs of a layer."""
    _kept.drop(_is_owned_by(layer))


def _is_owned_by(layer: nn.Module) -> Callable[[_Kept], bool]:
    owners = [id(x) for x in (layer, *layer.__dict__.get("_parameters", {}).values()) if x is not None]
    return lambda kept: id(kept.owner()) in owners
