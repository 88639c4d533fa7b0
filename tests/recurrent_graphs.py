"""Helpers of tests of RNN, GRU and LSTM in CUDA graphs: small layers on a GPU, their inputs, gradients."""

import torch

from recurrent_layers import make

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEPS, BATCH, INPUT, HIDDEN = 7, 3, 16, 24


def layer_of(cell, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return make(cell, INPUT, HIDDEN, **options).to("cuda", dtype)


def input_of(layer, seed=0):
    shape = (BATCH, STEPS, INPUT) if layer.batch_first else (STEPS, BATCH, INPUT)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(layer.weight_ih_l0).requires_grad_()


def states_of(layer, seed=0):
    shape = 2 if layer.mode == "LSTM" else 1, len(layer._all_weights), BATCH, HIDDEN
    states = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(layer.weight_ih_l0)
    states = [x.clone().requires_grad_() for x in states]
    return tuple(states) if layer.mode == "LSTM" else states[0]


def flat(*results):
    for x in results:
        if isinstance(x, tuple):
            yield from flat(*x)
        else:
            yield x


def gradients(layer, results, inputs, chosen=(0, 1, 2), **options):
    """Return the gradients of all parameters and of these inputs, by a loss of the chosen results."""
    results = [x for i, x in enumerate(flat(*results)) if i in chosen]
    wanted = [*layer.parameters(), *flat(*inputs)]
    loss = sum((x.float() * x.float().detach().cos()).sum() for x in results)
    return torch.autograd.grad(loss, wanted, allow_unused=True, **options)
