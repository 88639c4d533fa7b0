"""The forward pass of a recurrent layer and direction, by a device's kernels or by the reference loop over time."""

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
    """The kernels and the plan that compute a layer, which depend on its sizes and mask alone.

    Called with the operator's arguments, it returns the operator's results, None for absent ones.
    """

    kernels: Kernels  # the device's, or the reference
    plan: Plan
    tf32: bool  # whether float32 products may be rounded to tf32
    small: SmallProducts | None  # computes the products, if the layer is small

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        arguments = Arguments(*args)
        with without_autocast(arguments.x.device.type):  # the tensors are converted already
            projected = self.project(arguments.x, arguments.weight_ih, arguments.bias_ih)
            results = self.kernels.forward(self.layer_of(arguments), projected, self.plan, arguments.training)
        return _results(arguments, projected, results)

    def both(self, *calls: tuple) -> list[tuple]:
        """The results of both directions of a layer, whose loops over time run in one launch."""
        each = [Arguments(*args) for args in calls]
        with without_autocast(each[0].x.device.type):
            products = [(arguments.x, arguments.weight_ih, arguments.bias_ih) for arguments in each]
            if self.small is not None:
                projected = self.small.linear(self.tf32, *((*product, None) for product in products))
            else:
                projected = [self.project(*product) for product in products]
            runs = [
                (arguments.layer, x, self.plan, arguments.training)
                for arguments, x in zip(each, projected, strict=True)
            ]
            results = as_gpu(self.kernels).forward_both(*runs)
        return [*map(_results, each, projected, results)]

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
        """The product of the input and its weights, written `into` this tensor, if given."""
        if self.small is not None:
            return self.small.linear(self.tf32, (x, weight, bias, into))[0]
        product = x, weight, bias, self.tf32
        return linear(*product) if into is None else linear_into(into, *product)

    def layer_of(self, arguments: Arguments) -> Layer:
        """The layer as the kernels take it: with zeros for pruned weights where the kernel reads them."""
        layer, mask = arguments.layer, arguments.mask_hh
        if mask is None or not mask.is_cuda or arguments.training or self.plan.path in ("block", "sparse"):
            return layer
        # The dense kernels multiply all weights; the block and sparse kernels read only those that the mask keeps.
        return layer._replace(weight_hh=torch.where(mask, layer.weight_hh, 0.0))


def _results(arguments: Arguments, projected: Tensor, loop_results: ForwardResults) -> tuple:
    """The operator's results, None for absent ones, from those of the kernels' forward."""
    output, h_n, c_n, c = loop_results
    c_width, gates_width = kept_widths(arguments)
    return output, h_n, c_n, c if c_width else None, projected if gates_width else None


def executor_of(*args: Any, bidirectional: bool = False) -> Executor:
    """The executor of a call with the operator's arguments: a device's kernels, or the reference where none fits."""
    arguments = Arguments(*args)
    plan = plan_layer(arguments.mask_hh, call_of(arguments)._replace(bidirectional=bidirectional))
    kernels: Kernels = kernels_on(arguments.x.device) if plan.has_kernel else reference
    captured = plan.has_kernel and is_captured(arguments.x.device)
    if captured:
        cublas.create_handle(arguments.x.device)
    small = _small_products(kernels, arguments, captured)
    return Executor(kernels, plan, layers_allow_tf32(arguments.x.device, arguments.x.dtype), small)


def _small_products(kernels: Kernels, arguments: Arguments, captured: bool) -> SmallProducts | None:
    """The device's products of small layers, if the layer is small and the device has any, else None."""
    small, hidden = kernels.small, arguments.weight_hh.shape[1]
    if small is None:
        return None
    rows, channels = arguments.x.shape
    sizes = rows, GATES[arguments.cell] * hidden, max(channels, hidden)
    is_small = small.is_small(arguments.x.get_device(), arguments.x.dtype, *sizes, arguments.training, captured)
    return small if is_small else None


def call_of(arguments: Arguments) -> Call:
    """The properties of a call that its plan depends on."""
    x, sequences = arguments.x, arguments.sequences
    return Call(
        x.device,
        arguments.cell,
        arguments.weight_hh.shape[1],
        arguments.batch,
        x.dtype,
        arguments.training,
        sequences.length(x),
        arguments.path,
        arguments.at_once,
        resets=arguments.resets is not None,
        packed=arguments.offsets is not None,
    )
