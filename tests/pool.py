"""Processes that are started once and run one function after the other together, as a process group of gloo's.

They are forked from one that has imported this library, and others can be at any time, for what takes a process of its
own: that costs a few milliseconds, where an interpreter takes seconds to import PyTorch.
"""

import os
import traceback

import torch
from torch import distributed


class Pool:
    """`size` processes; :meth:`run` takes as many of them as asked for, :meth:`apart` starts another."""

    def __init__(self, size, folder):
        self.size, self.folder, self.calls = size, folder, 0
        self.context = torch.multiprocessing.get_context("forkserver")  # of which one process imports for all
        self.context.set_forkserver_preload(["ostinato.models", "torch.distributed.fsdp", "torch._dynamo", "numba"])
        self.start()

    def start(self):
        self.members = []
        for rank in range(self.size):
            ours, theirs = self.context.Pipe()
            self.members.append((self.apart(_serve, theirs, rank), ours))
            theirs.close()

    def apart(self, function, *arguments):
        """A process of its own that calls function(*arguments)."""
        process = self.context.Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    def run(self, size, function, *arguments):
        """What function(*arguments) returns in each of `size` processes that are one group, float64 their default."""
        self.calls += 1
        members = self.members[:size]
        for _, pipe in members:
            pipe.send((function, arguments, size, str(self.folder / str(self.calls))))
        answers = [_answer(pipe) for _, pipe in members]
        failed = [f"process {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        if failed:  # the others may wait for it
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
            os._exit(0)  # what is left of gloo's threads at an ordinary end now and then aborts the process
        torch.set_default_dtype(torch.float64)
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
        try:
            answer = function(*arguments), None
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)
        distributed.barrier()  # one that leaves while others still connect their groups is taken for crashed by gloo
        distributed.destroy_process_group()
