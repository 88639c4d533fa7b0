"""Calls of every entry point of the CPU's scans and minimal layers, for tests of what they share."""

import torch

from minimal_layers import layer, layer_backward
from ostinato.kernels.scan import Order, cpu


def everything(seed):
    """Call every entry point, with inputs large enough to be split among threads."""
    generator = torch.Generator().manual_seed(seed)
    a, b, grad_h = (torch.rand(3, 50, 70, generator=generator) for _ in range(3))
    wide = torch.rand(1, 9, 2100, generator=generator)
    pre = torch.randn(20, 30, 2 * 3 * 40, generator=generator)
    bias, grad = torch.randn(240, generator=generator), torch.randn(20, 30, 80, generator=generator)
    h, h_last = cpu.linear_scan(a, b, None, Order())
    log_h, log_last = cpu.log_linear_scan(a.log(), b.log(), None, Order(reverse=True))
    y, y_last = layer("cpu", pre, bias, None, None, "minlstm", "positive", False, 2)
    return (
        *(h, h_last, log_h, log_last, y, y_last),
        *cpu.linear_scan(wide, wide, None, Order(reverse=True)),
        *cpu.linear_scan_backward(a, h, None, grad_h, h_last, Order()),
        *cpu.log_linear_scan_backward(a.log(), b.log(), log_h, None, grad_h, log_last, Order(reverse=True)),
        *layer_backward("cpu", pre, bias, None, y, grad, y_last, None, "minlstm", "positive", False, 2),
    )
