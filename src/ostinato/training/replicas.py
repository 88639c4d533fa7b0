"""A model in several processes: replicated (DDP) or sharded (FSDP2), and the reduction of its gradients."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ostinato.models import LanguageModel


def replica_of(model: LanguageModel, mesh: DeviceMesh | None, shard: bool) -> nn.Module:
    """The model wrapped for training in several processes: replicated, or sharded block by block."""
    if mesh is None:
        return model
    if not shard:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    # In-place changes of a view that a block returns would bypass the hooks; the model makes none.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    for block in model.blocks:
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    return model


@contextmanager
def reducing(replica: nn.Module, last: bool) -> Iterator[None]:
    """Reduce gradients over the processes in the last micro-batch's backward only; accumulate them before."""
    if isinstance(replica, FSDPModule):
        replica.set_requires_gradient_sync(last)
    if isinstance(replica, DistributedDataParallel) and not last:
        with replica.no_sync():
            yield
    else:
        yield
