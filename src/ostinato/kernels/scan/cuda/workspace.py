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


_launching = threading.Lock()  # launches must be queued on a stream in the order of their epochs
_workspaces: dict[tuple[int, int], _Workspace] = {}  # by device and stream


def start_in_workspace(
    start: Callable[..., None], device: int, words: int, draws: int = 0, arguments: Sequence[int] = ()
) -> None:
    """Call ``start(*arguments, messages, counter, epoch, drawn)``, which launches chained blocks on the current stream.

    The stream's workspace has room for messages of `words` times 8 bytes.  Look-back blocks draw tiles from its
    counter, which is at `drawn` before the launch and advances by `draws`.  A workspace is replaced if such a launch
    was interrupted, as the value of its counter is then unknown.  A captured launch is replayed with the same epoch, so
    it has messages of its own, and a counter in their last 16 bytes, cleared by a captured memset.
    """
    with _launching:
        if torch.cuda.is_current_stream_capturing():
            memory = torch.zeros(words, dtype=torch.int64, device=torch.device("cuda", device)).data_ptr()
            start(*arguments, memory, memory + 8 * (words - 2), _MARKS, 0)
            return
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
        workspace.drawing = draws > 0
        addresses = workspace.memory.data_ptr(), workspace.counter.data_ptr()
        start(*arguments, *addresses, workspace.epoch, workspace.drawn)
        workspace.drawn = (workspace.drawn + draws) % (1 << 32)
        workspace.drawing = False
