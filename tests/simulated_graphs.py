"""A simulation of CUDA graphs on a CPU, of PyTorch's operations."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ostinato.cuda_graphs import calls, function, kept


class Recorded(TorchDispatchMode):
    """Stands in for a CUDA graph: records all operations, and replays them on the same memory."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # the recorded operations are those after autocast
    def replay(self):
        for func, args, kwargs, results in self.operations:
            args = tree_map_only(torch.Tensor, lambda x: x.data, args)  # whose changes autograd does not count
            for before, now in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(before, torch.Tensor):
                    before.data.copy_(now)


@contextlib.contextmanager
def recorded(device, pool):
    with torch.random.fork_rng([]), Recorded() as graph:  # a capture draws no random numbers
        yield graph


def move(weight):
    """Move a weight, with all that shares its storage, to other memory, as FSDP frees and reallocates parameters."""
    storage, address = weight.untyped_storage(), weight.data_ptr()
    content, size = storage.clone(), storage.nbytes()
    storage.resize_(0)
    in_its_place = [torch.full((size,), 255, dtype=torch.uint8, device=weight.device) for _ in range(64)]  # NaN
    storage.resize_(size)
    storage.copy_(content)
    assert weight.data_ptr() != address
    return in_its_place


@contextlib.contextmanager
def launched():
    """Launch calls instead of replaying graphs."""
    replay, calls.RepeatedCalls.replay = calls.RepeatedCalls.replay, lambda *_: None
    try:
        yield
    finally:
        calls.RepeatedCalls.replay = replay


def simulate(monkeypatch, bytes_of_graphs):
    """Simulate graphs on a CPU, from the second equal call on, each of which seems to keep this much memory."""
    for module in (calls, function):
        monkeypatch.setattr(module, "captured", recorded)
        monkeypatch.setattr(module, "bytes_of", lambda pool, result: bytes_of_graphs)
    monkeypatch.setattr(calls, "check_launches", lambda device: None)
    monkeypatch.setattr(kept, "USES", 1)
    monkeypatch.setattr(kept, "_kept", kept._AllKept())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
