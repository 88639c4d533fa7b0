"""Calls that repeat: from when on they have graphs, and how much memory all of these keep."""

import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

USES = 16  # of equal calls before they are captured: more than most warm-ups of other captures
MOST_KEPT = 512 << 20  # bytes of all graphs
_OF_FREE = 8  # one part of so many of a GPU's free memory at most, which who fills it is to have
_STALE = 4096  # replays of others, after which graphs may make room
_MOST_COUNTED = 512  # of calls of the same sizes, as of equal layers; graphs of as many have no room


class KeptGraphs:
    """Graphs with memory of their own."""

    bytes = 0  # with those of what is yet to be captured, as the backward
    last_replay = 0

    def count_replay(self) -> None:
        _kept.replays += 1
        self.last_replay = _kept.replays

    def give_up(self) -> None:
        """Free these graphs, whose call is launched from now on."""
        _kept.give_up(_is_of(self))


G = TypeVar("G", bound=KeptGraphs)


class Repeated(Generic[G]):
    """Calls of the same sizes, by what else tells them apart: how often one has come, then its graphs, or None."""

    def __init__(self) -> None:
        self.found: dict[tuple[Hashable, ...], int | G | None] = {}

    def graphs_of(
        self,
        key: tuple[Hashable, ...],
        capture: Callable[[], G],
        bytes_needed: int,
        device: torch.device,
        owner: nn.Module | nn.Parameter,
    ) -> G | None:
        """The graphs of a call, which are captured once it has come often enough.

        None if it has none: not yet, or as it cannot be captured, which is a RuntimeError, or as others leave no room,
        graphs or what else the GPU holds.  The key begins with where the weights are.  They would be kept, too: graphs
        go with their owner, which is the layer or a parameter of it, and with its weights.
        """
        found = self.found.get(key, 0)
        if type(found) is not int:
            return found  # type: ignore[return-value]
        if found < USES:
            if not found and len(self.found) >= _MOST_COUNTED:
                for counted, uses in list(self.found.items()):
                    if type(uses) is int:
                        self.found.pop(counted, None)
            self.found[key] = found + 1
            return None
        self.found[key] = None  # other threads launch meanwhile
        if _OF_FREE * bytes_needed <= torch.cuda.mem_get_info(device)[0] and _kept.make_room(bytes_needed):
            with suppress(RuntimeError):
                self.found[key] = graphs = capture()
                graphs.bytes = max(graphs.bytes, bytes_needed)
                _kept.add(graphs, self.found, key, owner)
                return graphs
        return None


class _Kept(NamedTuple):
    """Graphs, and where they are found."""

    graphs: KeptGraphs
    found: dict[tuple[Hashable, ...], Any]
    key: tuple[Hashable, ...]
    owner: Callable[[], Any]


def _is_of(graphs: KeptGraphs) -> Callable[[_Kept], bool]:
    return lambda kept: kept.graphs is graphs


class _AllKept:
    """All graphs that there are, whose memory is bounded."""

    def __init__(self) -> None:
        self.replays, self._all = 0, list[_Kept]()

    def drop(self, is_meant: Callable[[_Kept], bool]) -> list[_Kept]:
        """Free some of the graphs, which are returned; their calls are counted anew."""
        dropped = [*filter(is_meant, self._all[:])]
        for kept in dropped:
            with suppress(ValueError):  # another thread, or the collection of garbage, may have come first
                self._all.remove(kept)
            kept.found.pop(kept.key, None)
        return dropped

    def give_up(self, is_meant: Callable[[_Kept], bool]) -> None:
        """Free some of the graphs, whose calls are launched from now on."""
        for kept in self.drop(is_meant):
            kept.found[kept.key] = None

    def make_room(self, bytes_needed: int) -> bool:
        """Whether there is room, of graphs that have not been used for long, too."""
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
        found: dict[tuple[Hashable, ...], Any],
        key: tuple[Hashable, ...],
        owner: nn.Module | nn.Parameter,
    ) -> None:
        for kept in self._all[:]:
            if kept.owner() is owner and kept.key[0] != key[0]:  # its weights before, which are kept too
                self.give_up(_is_of(kept.graphs))
        self._all.append(_Kept(graphs, found, key, weakref.ref(owner, lambda _: self.drop(_is_of(graphs)))))


_kept = _AllKept()


class FreesGraphs(nn.Module):
    """A layer whose graphs, which keep its weights in memory, are freed where these are moved or replaced."""

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        forget(self)
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            # Those before may come back, as FSDP2's at every call, and would be captured again and again.
            _kept.give_up(_is_owned_by(self))
        super().__setattr__(name, value)


def forget(layer: nn.Module) -> None:
    """Free the graphs of a layer."""
    _kept.drop(_is_owned_by(layer))


def _is_owned_by(layer: nn.Module) -> Callable[[_Kept], bool]:
    owners = [id(x) for x in (layer, *layer.__dict__.get("_parameters", {}).values()) if x is not None]
    return lambda kept: id(kept.owner()) in owners
