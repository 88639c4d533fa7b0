"""Layers with random weights for the persistent CUDA kernels, and their comparison with the loop over time."""

import itertools
import random

import torch

from comparisons import same_bits
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent import cuda, reference
from ostinato.kernels.persistent.arguments import Layer, Saved
from ostinato.kernels.persistent.cuda import launch as cuda_launch
from ostinato.kernels.persistent.cuda import plan as cuda_plan
from ostinato.kernels.persistent.cuda.heuristics.costs import microseconds
from ostinato.kernels.persistent.cuda.source import code, feature, macros
from ostinato.kernels.persistent.plan import GATES, Plan
from ostinato.kernels.persistent.sequences import Sequences
from persistent_geometries import candidate, candidates, random_mask

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
TOLERANCE = {f32: 2e-6, f16: 2e-3, bf16: 1.5e-2}
DENSE = [
    ("rnn_tanh", 2304, 4, f16),
    ("gru", 2304, 4, f16),
    ("lstm", 2304, 4, f16),
    ("rnn_relu", 101, 3, f16),
    ("gru", 101, 5, bf16),
    ("lstm", 37, 1, bf16),
    ("lstm", 768, 16, f16),
    ("lstm", 1024, 64, f16),
    ("gru", 515, 23, f16),
    ("lstm", 1, 1, f16),
    ("gru", 2, 2, f32),
    ("gru", 256, 4, f32),
    ("lstm", 1024, 16, f32),
    ("rnn_relu", 515, 23, f32),
    ("lstm", 515, 1, f32),
    ("gru", 2048, 3, f32),
    ("gru", 2048, 1, f32),
]
PRUNED = [
    ("rnn_tanh", 64, 4, f16, 0.3, (16, 1)),
    ("gru", 2304, 4, f16, 0.1, (16, 1)),
    ("gru", 101, 5, bf16, 0.2, (8, 4)),
    ("lstm", 515, 23, f16, 0.15, (8, 4)),
    ("rnn_relu", 37, 1, f16, 0.3, (16, 1)),
    ("gru", 256, 4, f32, 0.1, (16, 1)),
    ("lstm", 130, 9, f32, 0.2, (8, 4)),
    ("rnn_tanh", 8192, 4, f16, 0.1, (16, 1)),
    ("lstm", 2304, 4, bf16, 0.1, (1, 1)),
    ("gru", 515, 7, f16, 0.3, (1, 1)),
]
LAYERS = [("dense", x) for x in DENSE]
LAYERS += [("block", x) for x in PRUNED if x[5] != (1, 1)] + [("sparse", x) for x in PRUNED]

STREAMED = [  # by persistent_geometries.streamed
    ("dense", ("gru", 771, 3, f16)),
    ("dense", ("lstm", 515, 5, f32)),
    ("block", ("gru", 771, 4, bf16, 0.9, (16, 1))),
    ("block", ("lstm", 515, 5, f32, 0.8, (16, 1))),
    ("sparse", ("lstm", 771, 4, f16, 0.7, (1, 1))),
    ("sparse", ("gru", 771, 7, bf16, 0.9, (1, 1))),
    ("sparse", ("rnn_tanh", 1030, 2, f32, 0.98, (1, 1))),
]


class Case:
    """A layer with random weights, and its inputs."""

    def __init__(self, path, cell, hidden, batch, dtype, density=1.0, block=None, forward=None, back=None):
        self.cell, self.hidden, self.batch, self.dtype, self.device = (
            cell,
            hidden,
            batch,
            dtype,
            torch.device("cuda", 0),
        )
        bound = (hidden * density) ** -0.5
        self.weight = self.uniform(GATES[cell] * hidden, hidden) * bound
        self.bias = self.uniform(GATES[cell] * hidden) if hidden % 2 else None
        self.mask = None
        if density < 1:
            self.mask = random_mask(cell, hidden, density, block, self.device)
            self.weight = self.weight * self.mask
        layer, properties = (cell, hidden, batch, dtype, density, block), torch.cuda.get_device_properties(0)
        forward = forward or candidate(path, *layer, properties=properties)
        if back is None:  # what is kept in strips forward may not fit in strips of the transposed matrix
            paths = (path, "dense") if path == "block" else (path,)
            ways = (candidates(name, *layer, properties=properties, backward=True) for name in paths)
            back = min(itertools.chain(*ways), key=lambda g: microseconds(g, batch), default=None)
        self.is_trained = back is not None
        self.plan = Plan(path, geometry=cuda_plan.Geometries(forward, back))

    def uniform(self, *shape):
        return (torch.rand(shape, device=self.device) * 2 - 1).to(self.dtype)

    def inputs(self, steps, batch=None, with_state=True, packed=False, resets=0.0):
        """Return the projected input, the initial states, and the sequences with their resets."""
        batch = batch or self.batch
        sizes = [batch] * steps
        if packed:
            lengths = [steps, *(random.randint(1, steps) for _ in range(batch - 1))]
            sizes = [sum(length > t for length in lengths) for t in range(steps)]
        offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=self.device)
        projected = torch.randn(sum(sizes), GATES[self.cell] * self.hidden, device=self.device).to(self.dtype)
        h = self.uniform(batch, self.hidden) if with_state else None
        c = torch.randn_like(h) if with_state and self.cell == "lstm" else None
        begins = torch.rand(sum(sizes), device=self.device) < resets if resets else None
        return projected, h, c, Sequences(batch, offsets if packed else None, begins)

    def layer(self, inputs, reverse):
        _, h, c, sequences = inputs
        return Layer(self.cell, self.weight, self.bias, self.mask, h, c, sequences._replace(reverse=reverse))

    def forward(self, inputs, reverse, kernels=cuda, wide=lambda x: x):
        projected = inputs[0].clone()  # the forward pass may write to it
        return kernels.forward(wide(self.layer(inputs, reverse)), wide(projected), self.plan, True)

    def gradients(self, inputs, reverse):
        """Return arguments of the backward pass, with random states and pre-activations."""
        projected, h, c, _ = inputs
        states = self.uniform(len(projected), self.hidden)
        rnn, gru, lstm = self.cell.startswith("rnn"), self.cell == "gru", self.cell == "lstm"
        saved = Saved(
            states if rnn else projected,
            self.uniform(*states.shape) if gru else None,
            states,
            torch.randn_like(states, dtype=torch.float32) if lstm else None,
        )
        upstream = torch.randn_like(states), *(None if x is None else torch.randn_like(x) for x in (h, c))
        return self.layer(inputs, reverse), saved, upstream, self.plan

    @staticmethod
    def backward(gradients, kernels=cuda, wide=lambda x: x):
        """Run the backward pass, and sum the rows that it leaves unsummed, whose number differs in the reference."""
        *others, rows = kernels.backward(*map(wide, gradients))
        return (*others, rows.sum(0))

    def both(self, inputs, gradients, reverse, kernels=cuda, wide=lambda x: x):
        """Run the forward and the backward pass, or only the former where no kernel fits the backward pass."""
        results = self.forward(inputs, reverse, kernels, wide)
        return (*results, *self.backward(gradients, kernels, wide)) if self.is_trained else results

    def expected(self, inputs, reverse):
        return self.forward(inputs, reverse, reference, double)

    def check(self):
        torch.cuda.synchronize()
        cuda_launch.check(0)


def double(x):
    """Convert a floating-point tensor, or all in a tuple, to float64."""
    if isinstance(x, Layer | Saved):
        return type(x)(*map(double, x))
    if type(x) is tuple:
        return tuple(map(double, x))
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def errors(found, expected):
    """Return the errors of all results that both have: a GRU's kernel may save tensors that the reference does not.

    They are relative, except for results of one or a few numbers that have nearly cancelled.
    """
    pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None]
    return torch.stack([(x.double() - y).norm() / y.norm().clamp(min=0.1) for x, y in pairs])


def assert_matches_the_reference(case, run, tolerance):
    """Assert that a pass returns the same bits twice, close to the results of the loop over time in float64."""
    found, again = run(), run()
    case.check()
    assert same_bits(found, again)
    assert errors(found, run(reference, double)).max() < tolerance, case.plan.geometry


def assert_compiles(geometry, architecture="sm_90", **calls):
    """Compile the kernel of a geometry, for calls with resets or packed sequences, or that save the gates."""
    text, definitions = code(geometry), dict(macros(geometry, **calls))
    assert nvrtc.compile_cubin(text, architecture + feature(geometry), definitions)[:4] == b"\x7fELF"
