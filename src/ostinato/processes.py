"""The processes of one training: how they are laid out, what each takes, and who writes."""

from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

AXES = ("dp_replicate", "dp_shard", "cp")


def make_mesh(device_type: str, *, shard: bool = False, sequence_parallel: int = 1) -> DeviceMesh | None:
    """All processes of the default group, as ("dp_replicate", "dp_shard", "cp"); None if there is one process alone.

    ``sequence_parallel`` neighbours share each sequence ("cp"); the others are copies of the model, or hold a shard of
    it each with ``shard``.  Raises ValueError if the processes cannot be divided so.
    """
    processes = distributed.get_world_size() if distributed.is_initialized() else 1
    if sequence_parallel < 1 or processes % sequence_parallel:
        raise ValueError(f"sequence_parallel must divide the number of processes, {processes}; got {sequence_parallel}")
    if processes == 1:
        return None
    data = processes // sequence_parallel
    shape = (1, data, sequence_parallel) if shard else (data, 1, sequence_parallel)
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


class Share(NamedTuple):
    """What this process takes: of the rows of a batch, and of the steps of a sequence."""

    rows_rank: int = 0
    rows_of: int = 1
    steps_rank: int = 0
    steps_of: int = 1

    @classmethod
    def on(cls, mesh: DeviceMesh | None) -> "Share":
        coordinate = None if mesh is None else mesh.get_coordinate()
        if mesh is None or coordinate is None:
            return cls()
        (replica, shard, steps_rank), (_, shards, steps_of) = coordinate, mesh.shape
        return cls(replica * shards + shard, mesh.size() // steps_of, steps_rank, steps_of)

    @property
    def alone(self) -> bool:
        return self.rows_of * self.steps_of == 1

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of the processes' tensors."""
        if not self.alone:
            tensor = tensor.clone()
            distributed.all_reduce(tensor)
        return tensor

    def of_each(self, tensor: Tensor) -> list[Tensor]:
        """The processes' tensors, all of one shape, on the CPU."""
        if self.alone:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
        distributed.all_gather(tensors, tensor)
        return tensors

    def rows(self, number: int) -> slice:
        return part(number, self.rows_rank, self.rows_of)

    def steps(self, number: int) -> slice:
        return part(number, self.steps_rank, self.steps_of)


def part(number: int, rank: int, of: int) -> slice:
    """The contiguous part of ``number`` things that falls to ``rank``: as many as to the others, or one fewer."""
    return slice(number * rank // of, number * (rank + 1) // of)


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this process may hold a shard; then every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor that is sharded as ``like`` is, on its device."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def agree(steps: int, stop: bool) -> tuple[int, bool]:
    """The first process's number of steps, and whether any process is to stop."""
    if not distributed.is_initialized():
        return steps, stop
    said = torch.tensor([steps if is_first() else 0, stop])
    distributed.all_reduce(said, distributed.ReduceOp.MAX)
    return int(said[0]), bool(said[1])
