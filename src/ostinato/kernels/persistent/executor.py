"""Who computes a recurrent layer and direction: its forward by the kernels of a device, or by the loop over time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.matmul import cublas
from ostinato.kernels.matmul.gemm import linear, linear_into
from ostinato.kernels.matmul.precision import layers_allow_tf32
from ostinato.kernels.persistent import reference
from ostinato.kernels.persistent.arguments import Arguments, Layer
from ostinato.kernels.persistent.backends import as_gpu, is_captured, kernels_on, plan_layer
from ostinato.kernels.persistent.interface import ForwardResults, Kernels, SmallProducts
from ostinato.kernels.persistent.modes import without_autocast
from ostinato.kernels.persistent.plan import GATES, Call, Plan
from ostinato.kernels.persistent.results import kept_widths


class Executor(NamedTuple):
    """Who computes a layer, chosen by its sizes and mask alone.

    Called with the operator's arguments, it returns its results, but None for those that are absent.
    """

    kernels: Kernels  # the device's, or the reference
    plan: Plan
    tf32: bool  # whether products of float32 may be rounded to tf32
    small: SmallProducts | None  # of a small layer

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        given = Arguments(*args)
        with without_autocast(given.x.device.type):  # the tensors are converted already
            projected = self.project(given.x, given.weight_ih, given.bias_ih)
            found = self.kernels.forward(self.layer_of(given), projected, self.plan, given.training)
        return _results(given, projected, found)

    def both(self, *calls: tuple) -> list[tuple]:
        """The results of both directions of a layer, whose loops are one launch."""
        each = [Arguments(*args) for args in calls]
        with without_autocast(each[0].x.device.type):
            products = [(given.x, given.weight_ih, given.bias_ih) for given in each]
            if self.small is not None:
                projected = self.small.linear(self.tf32, *((*product, None) for product in products))
            else:
                projected = [self.project(*product) for product in products]
            runs = [(given.layer, x, self.plan, given.training) for given, x in zip(each, projected, strict=True)]
            found = as_gpu(self.kernels).forward_both(*runs)
        return [*map(_results, each, projected, found)]

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
        """The product with the input, written `into` this tensor, if given."""
        if self.small is not None:
            return self.small.linear(self.tf32, (x, weight, bias, into))[0]
        product = x, weight, bias, self.tf32
        return linear(*product) if into is None else linear_into(into, *product)

    def layer_of(self, given: Arguments) -> Layer:
        """The layer as the kernels take it."""
        layer, mask = given.layer, given.mask_hh
        if mask is None or not mask.is_cuda or given.training or self.plan.path in ("block", "sparse"):
            return layer
        # The dense kernels multiply all weights; those of pruned ones read only what the mask keeps.
        return layer._replace(weight_hh=torch.where(mask, layer.weight_hh, 0.0))


def _results(given: Arguments, projected: Tensor, found: ForwardResults) -> tuple:
    """The operator's results, None for those that are absent, of what a forward returns."""
    output, h_n, c_n, c = found
    c_width, gates_width = kept_widths(given)
    return output, h_n, c_n, c if c_width else None, projected if gates_width else None


def executor_of(*args: Any, bidirectional: bool = False) -> Executor:
    """Who computes a call with the operator's arguments: a device's kernels, or the loop over time where none fits."""
    given = Arguments(*args)
    plan = plan_layer(given.mask_hh, call_of(given)._replace(bidirectional=bidirectional))
    kernels: Kernels = kernels_on(given.x.device) if plan.has_kernel else reference
    captured = plan.has_kernel and is_captured(given.x.device)
    if captured:
        cublas.create_handle(given.x.device)
    small = _products_of_small(kernels, given, captured)
    return Executor(kernels, plan, layers_allow_tf32(given.x.device, given.x.dtype), small)


def _products_of_small(kernels: Kernels, given: Arguments, captured: bool) -> SmallProducts | None:
    """What computes the products of a layer together, if it is small and there is such, else None."""
    small, hidden = kernels.small, given.weight_hh.shape[1]
    if small is None:
        return None
    rows, channels = given.x.shape
    sizes = rows, GATES[given.cell] * hidden, max(channels, hidden)
    of_call = given.x.get_device(), given.x.dtype, *sizes, given.training, captured
    return small if small.is_small(*of_call) else None


def call_of(given: Arguments) -> Call:
    """What the plan depends on."""
    x, sequences = given.x, given.sequences
    return Call(
        x.device,
        given.cell,
        given.weight_hh.shape[1],
        given.batch,
        x.dtype,
        given.training,
        sequences.length(x),
        given.path,
        given.at_once,
        resets=given.resets is not None,
        packed=given.offsets is not None,
    )
