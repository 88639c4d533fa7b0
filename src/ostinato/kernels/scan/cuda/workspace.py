"""The workspaces in global memory through which chained blocks exchange states: each stream's launches share one."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_MARKS = 4  # the number of kinds of ``Mark`` in ``messages.cuh``, of which epochs are multiples


class _Workspace:
    """The messages of chained blocks and the counter of look-back, for the successive launches on one stream."""

    def __init__(self, words: int, device: int) -> None:
        def zeros() -> Any:
            allocated = [torch.zeros(n, dtype=torch.int64, device=torch.device("cuda", device)) for n in (words, 1)]
            return allocated, torch.cuda.current_stream(device).record_event()

        # Another thread allocates them: while PyTorch's compiler warms up a CUDA graph, what this thread allocates
        # belongs to the graph and must not be kept.
        with ThreadPoolExecutor(1) as pool:
            allocated, event = pool.submit(zeros).result()
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        for x in allocated:
            x.record_stream(stream)
        self.memory, self.counter = allocated
        self.epoch = self.drawn = 0
        self.drawing = False  # true while a look-back launch is being queued


launching = threading.Lock()  # launches must be queued on a stream in the order of their epochs
_workspaces: dict[tuple[int, int], _Workspace] = {}  # by device and stream


def published_of(device: int, words: int) -> tuple[int, int]:
    """The address of the current stream's workspace, with room for `words`, and the epoch of this launch.

    A captured launch is replayed with the same epoch, so it gets a workspace of its own, cleared by a captured memset.
    A workspace is replaced if a look-back launch was interrupted: the value of its counter is then unknown.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=torch.int64, device=torch.device("cuda", device)).data_ptr(), _MARKS
    key = device, torch._C._cuda_getCurrentRawStream(device)
    workspace = _workspaces.get(key)
    if (
        workspace is None
        or len(workspace.memory) < words
        or workspace.drawing
        or workspace.epoch >= (1 << 32) - 2 * _MARKS
    ):
        workspace = _workspaces[key] = _Workspace(words, device)
    workspace.epoch += _MARKS
    return workspace.memory.data_ptr(), workspace.epoch


def start_drawing(
    start: Callable[..., None],
    device: int,
    words: int,
    draws: int,
    published: int,
    epoch: int,
    addresses: Sequence[int],
) -> None:
    """Launch look-back blocks, which draw tiles from a counter and thereby advance it by `draws`.

    The counter is that of the workspace, and continues from the previous launch; a captured launch has its own counter,
    after its messages.
    """
    if torch.cuda.is_current_stream_capturing():
        start(*addresses, published, published + 8 * (words - 2), epoch, 0)
        return
    workspace = _workspaces[device, torch._C._cuda_getCurrentRawStream(device)]
    workspace.drawing = True
    start(*addresses, published, workspace.counter.data_ptr(), epoch, workspace.drawn)
    workspace.drawn = (workspace.drawn + draws) % (1 << 32)
    workspace.drawing = False
