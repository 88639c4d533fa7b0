"""The memory in which chained blocks tell each other their states: one for each stream, reused by its launches."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_MARKS = 4  # kinds of ``Mark``, see ``messages.cuh``


class _Workspace:
    """The messages of chained blocks, reused by one stream's successive launches."""

    def __init__(self, words: int, device: int) -> None:
        def zeros() -> Any:
            made = [torch.zeros(n, dtype=torch.int64, device=torch.device("cuda", device)) for n in (words, 1)]
            return made, torch.cuda.current_stream(device).record_event()

        # What a thread allocates while PyTorch's compiler warms up a CUDA graph is the graph's, and must not be kept.
        with ThreadPoolExecutor(1) as pool:
            made, event = pool.submit(zeros).result()
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        for x in made:
            x.record_stream(stream)
        self.memory, self.counter = made
        self.epoch = self.drawn = 0
        self.drawing = False  # while a look-back launch is being made


launching = threading.Lock()  # launches must be queued on the stream in the order of their epochs
_workspaces: dict[tuple[int, int], _Workspace] = {}  # by device and stream


def published_of(device: int, words: int) -> tuple[int, int]:
    """The address of the current stream's workspace and the epoch of this launch.

    A captured launch is replayed with the same epoch, so it gets a workspace of its own, cleared by a captured memset.
    A workspace is discarded if a look-back launch was interrupted: its counter is then unknown.
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
    start: Callable[..., None], device: int, words: int, draws: int, published: int, epoch: int, given: Sequence[int]
) -> None:
    """Launch look-back blocks, which draw so many tiles from a counter that continues from the previous launch.

    The counter is the workspace's; that of a captured launch follows the messages.
    """
    if torch.cuda.is_current_stream_capturing():
        start(*given, published, published + 8 * (words - 2), epoch, 0)
        return
    workspace = _workspaces[device, torch._C._cuda_getCurrentRawStream(device)]
    workspace.drawing = True
    start(*given, published, workspace.counter.data_ptr(), epoch, workspace.drawn)
    workspace.drawn = (workspace.drawn + draws) % (1 << 32)
    workspace.drawing = False
