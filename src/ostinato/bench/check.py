"""The errors of the contestants' results, relative to the same recurrence in float64."""

from functools import partial

import torch
from torch import Tensor

from ostinato.bench.workloads import Equation, Layer, RecurrentLayer, Run, Scan, Workload

CHECKED_STEPS = 8192  # at the end of a longer sequence
CHECKED_CHANNELS = 8  # evenly spaced over all
FORGOTTEN_AFTER = 256  # steps after which random gates have decayed a state below float64's resolution
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The relative error in the Euclidean norm."""
    return float((actual.detach().to(expected) - expected).norm() / expected.norm())


Errors = dict[str, dict[str, float]]  # by pass, then by the name of the result


class RecurrentCheck:
    """Compares the output, or every gradient, with that of ``torch.nn``'s layer in float64 on the workload's device.

    Gradients of pruned weights are not compared: in ``torch.nn``'s layer, pruned weights are ordinary parameters.
    """

    def __init__(self, work: RecurrentLayer, data: tuple[Tensor, ...]) -> None:
        self.work = work
        masks = {name: mask for name, mask in work.state_dict(data).items() if name.startswith("mask")}
        self.kept = {name: masks.get(name.replace("weight", "mask")) for name in work.differentiable}
        layer = work.torch_layer(data, torch.float64)
        exact = tuple(x if x.dtype == torch.bool else x.double() for x in data)
        run = work.run(partial(work.apply_torch, layer, exact), exact, layer.parameters())
        self.expected = {pass_name: self._results(run, pass_name) for pass_name in work.passes}

    def errors(self, run: Run) -> Errors:
        """Return the relative errors, in the Euclidean norm over all steps."""
        errors: Errors = {}
        for pass_name, expected in self.expected.items():
            actual = self._results(run, pass_name)
            errors[pass_name] = {name: relative_error(actual[name], expected[name]) for name in expected}
        return errors

    def _results(self, run: Run, pass_name: str) -> dict[str, Tensor]:
        results = run.prepare(pass_name)()
        if pass_name == "forward":
            return {"output": results}
        named = zip(self.kept.items(), results, strict=True)
        return {name: result if kept is None else result[kept] for (name, kept), result in named}


class ChannelCheck:
    """Compares some channels of the last sequence, over its last steps, with the recurrence in float64 on the CPU.

    Gradients are compared in the same window, outside of which the output's gradient is zero.
    """

    def __init__(self, work: Scan | Layer | Equation, data: tuple[Tensor, ...]) -> None:
        self.work, self.data = work, data
        length = data[0].shape[1]
        self.start = max(0, length - CHECKED_STEPS)
        self.skip = FORGOTTEN_AFTER if self.start else 0
        count = min(work.channels, CHECKED_CHANNELS)
        self.channels = torch.linspace(0, work.channels - 1, count).long().tolist()
        steps = length - self.start - self.skip
        self.grad = torch.randn(1, steps, count, dtype=work.dtype)
        self._expected: dict[bool, list[Tensor]] = {}

    def expected(self, bias: bool) -> list[Tensor]:
        """The output and, where a backward pass is measured, the gradient of each input."""
        if bias not in self._expected:
            windows = [self.work.window(x, self.start, self.channels) for x in self._inputs(self.data)]
            inputs = [x.detach().cpu().double().requires_grad_() for x in windows]
            output = self.work.reference(inputs, self.data, self.channels, bias)[:, self.skip :]
            has_backward = self.work.passes != ("forward",)
            grads = torch.autograd.grad(output, inputs, self.grad.double()) if has_backward else ()
            self._expected[bias] = [output.detach(), *(x[:, self.skip :] for x in grads)]
        return self._expected[bias]

    def errors(self, run: Run) -> Errors:
        """Return the relative errors of each pass, in the Euclidean norm over the window."""
        begin = self.start + self.skip
        if self.work.passes == ("forward",) or run.forward_only:
            with torch.no_grad():
                output = run.layout(run.call())
            error = relative_error(output[-1:, begin:][..., self.channels], self.expected(run.has_bias)[0])
            return {"forward": {"output": error}}
        output = run.layout(run.call())
        grad = torch.zeros_like(output)
        grad[-1:, begin:][..., self.channels] = self.grad.to(grad)
        grads = torch.autograd.grad(output, self._inputs(run.inputs), grad)
        results = [output[-1:, begin:][..., self.channels]]
        results += [self.work.window(run.layout(x), begin, self.channels) for x in grads]
        names = "output", *self.work.inputs
        pairs = zip(results, self.expected(run.has_bias), strict=True)
        errors = {name: relative_error(x, y) for name, (x, y) in zip(names, pairs, strict=True)}
        gradients = {name: error for name, error in errors.items() if name != "output"}
        return {"forward": {"output": errors["output"]}, "backward": gradients, "forward+backward": errors}

    def _inputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of the tensors that have a time axis, before weights of heads: a and b of a scan, x of a layer."""
        return tuple(x for x in tensors if x.dim() == 3)[: len(self.work.inputs)]


Check = RecurrentCheck | ChannelCheck  # holds a workload's float64 results, to compare those of each contestant with


def check_of(work: Workload, data: tuple[Tensor, ...]) -> Check:
    return RecurrentCheck(work, data) if isinstance(work, RecurrentLayer) else ChannelCheck(work, data)
