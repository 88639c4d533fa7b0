"""A pool of processes, started once, that together run one function after another as a gloo process group.

They are forked from a process that has imported this library, which takes a few milliseconds, whereas an interpreter
takes seconds to import PyTorch.  Further processes can be forked for tests that need one of their own.
"""

import os
import traceback

import torch
from torch import distributed


class Pool:
    """Holds `size` processes; :meth:`run` uses some of them, and :meth:`apart` starts another."""

    def __init__(self, size, folder):
        self.size, self.folder, self.calls = size, folder, 0
        self.context = torch.multiprocessing.get_context("forkserver")  # whose server imports for all
        self.context.set_forkserver_preload(["ostinato.models", "torch.distributed.fsdp", "torch._dynamo", "numba"])
        self.start()

    def start(self):
        self.members = []
        for rank in range(self.size):
            ours, theirs = self.context.Pipe()
            self.members.append((self.apart(_serve, theirs, rank), ours))
            theirs.close()

    def apart(self, function, *arguments):
        """Start another process that calls function(*arguments)."""
        process = self.context.Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    def run(self, size, function, *arguments):
        """Call function(*arguments) in a group of `size` processes, with float64 as default; return their results."""
        self.calls += 1
        members = self.members[:size]
        for _, pipe in members:
            pipe.send((function, arguments, size, str(self.folder / str(self.calls))))
        answers = [_answer(pipe) for _, pipe in members]
        failed = [f"process {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        if failed:  # the others may be waiting for it
            self.close()
            self.start()
            raise AssertionError("\n".join(failed))
        return [result for result, _ in answers]

    def close(self):
        for process, pipe in self.members:
            pipe.close()
            process.join(1)
            process.kill()


def _answer(pipe):
    try:
        return pipe.recv() if pipe.poll(90) else (None, "no answer")
    except EOFError:
        return None, "died"


def _serve(pipe, rank):
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, size, file = pipe.recv()
        except EOFError:
            os._exit(0)  # at an ordinary exit, remaining gloo threads sometimes abort the process
        torch.set_default_dtype(torch.float64)
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
        try:
            answer = function(*arguments), None
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)
        distributed.barrier()  # gloo takes a process that leaves while others are still connecting for crashed
        distributed.destroy_process_group()
