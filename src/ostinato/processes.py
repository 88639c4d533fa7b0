"""The processes of a distributed training: their mesh, each one's shard of the data, and collectives on small data."""

from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ostinato.checks import check_integers

AXES = ("dp_replicate", "dp_shard", "cp")


def make_mesh(device_type: str, *, shard: bool = False, sequence_parallel: int = 1) -> DeviceMesh | None:
    """All processes of the default group, as a mesh ("dp_replicate", "dp_shard", "cp").

    Args:
        device_type: "cpu" or "cuda", say.
        shard: shard the model over the processes ("dp_shard") instead of replicating it ("dp_replicate").
        sequence_parallel: neighbouring processes that shard each sequence ("cp").

    Returns:
        The mesh; None if there is a single process.

    Raises:
        TypeError: a ``sequence_parallel`` that is not an integer.
        ValueError: one that does not divide the number of processes.

    Example:
        >>> from ostinato.processes import make_mesh
        >>> make_mesh("cpu") is None  # without torchrun
        True
    """
    processes = distributed.get_world_size() if distributed.is_initialized() else 1
    check_integers(1, sequence_parallel=sequence_parallel)
    if processes % sequence_parallel:
        raise ValueError(f"sequence_parallel must divide the number of processes, {processes}; got {sequence_parallel}")
    if processes == 1:
        return None
    data = processes // sequence_parallel
    shape = (1, data, sequence_parallel) if shard else (data, 1, sequence_parallel)
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


class Share(NamedTuple):
    """This process's shard of a batch's rows and of a sequence's steps."""

    rows_rank: int = 0
    rows_of: int = 1
    steps_rank: int = 0
    steps_of: int = 1

    @classmethod
    def on(cls, mesh: DeviceMesh | None) -> "Share":
        """This process's share on a mesh; all rows and steps if there is none."""
        coordinate = None if mesh is None else mesh.get_coordinate()
        if mesh is None or coordinate is None:
            return cls()
        (replica, shard, steps_rank), (_, shards, steps_of) = coordinate, mesh.shape
        return cls(replica * shards + shard, mesh.size() // steps_of, steps_rank, steps_of)

    @property
    def alone(self) -> bool:
        return self.rows_of * self.steps_of == 1

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of all processes' tensors."""
        if not self.alone:
            tensor = tensor.clone()
            distributed.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, which are of the same shape and on the CPU."""
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
    """The contiguous shard of ``number`` items that belongs to ``rank``; shards differ in size by at most one."""
    return slice(number * rank // of, number * (rank + 1) // of)


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered if it is sharded, in which case every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a whole tensor, sharded as ``like`` is and on its device."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def all_have(content: bytes) -> bool:
    """Whether all processes call with the same bytes; their number must be the same."""
    if not distributed.is_initialized():
        return True
    mine = torch.tensor(list(content))
    bounds = torch.cat((mine, -mine))
    distributed.all_reduce(bounds, distributed.ReduceOp.MAX)
    greatest, negated_least = bounds.chunk(2)
    return torch.equal(greatest, -negated_least)


def agree(steps: int, stop: bool) -> tuple[int, bool]:
    """The first process's number of steps, and whether any process is to stop."""
    if not distributed.is_initialized():
        return steps, stop
    proposed = torch.tensor([steps if is_first() else 0, stop])
    distributed.all_reduce(proposed, distributed.ReduceOp.MAX)
    return int(proposed[0]), bool(proposed[1])
