"""Launches every kind of kernel on small inputs, for compute-sanitizer; ``make sanitize`` runs it.

``--list`` prints the parts' names; what is named is run, or everything.

Results are compared by the tests.  What does not belong to a kernel is computed on the CPU and copied, since other
kernels would be checked, too.
"""

import itertools
import sys
from functools import partial

import pytest
import torch

import ostinato
import persistent_cases
import persistent_geometries
import scan_kernels
from kernels.persistent import test_cuda_step, test_directions, test_small, test_states_before
from kernels.recurrence import test_nonlinear_recurrence, test_projected, test_weighted
from minimal_layers import GATES, layer, layer_backward
from ostinato.kernels.matmul import gemm, grouped
from ostinato.kernels.persistent import cuda as persistent
from ostinato.kernels.persistent import plan
from ostinato.kernels.persistent.arguments import Arguments
from ostinato.kernels.persistent.cuda import launch as cuda_launch
from ostinato.kernels.persistent.cuda import packing
from ostinato.kernels.persistent.cuda import plan as cuda_plan
from ostinato.kernels.persistent.cuda.heuristics.costs import microseconds
from ostinato.kernels.recurrence.arguments import Call
from ostinato.kernels.recurrence.linear import cuda as recurrence_cuda
from ostinato.kernels.recurrence.linear import projected
from ostinato.kernels.recurrence.nonlinear import cuda as steps_cuda
from ostinato.kernels.recurrence.weighted.persistent import Persistent
from ostinato.kernels.scan import Order, choose_backend
from ostinato.kernels.scan.cuda import compose
from ostinato.minimal.recurrences import recurrence_of
from ostinato.recurrent import sequences

FLAGS = (False, True)


def scans(dtype, kernels):
    # Of the first, copies of 16 bytes end beside the tensor; of the fourth, blocks are chained over several tiles; of
    # the last, which fills the GPU, 16-bit rows are two lines.
    shapes = ((2, 300, 12), (1, 777, 1), (3, 130, 33), (1, 1000, 72), (148, 70, 136))
    shapes = shapes if dtype.itemsize == 2 else shapes[:-1]
    for reverse, packed, (batch, steps, channels) in itertools.product(FLAGS, FLAGS, shapes):
        batch, sequences = (1, 5) if packed else (batch, batch)
        cu_seqlens = scan_kernels.boundaries(steps).cuda() if packed else None
        tensors = torch.rand(3, batch, steps, channels).to(dtype), torch.rand(2, sequences, channels).to(dtype)
        (a, b, grad), (h0, grad_last) = (x.cuda() for x in tensors)
        for initial, resets in ((h0, None), (None, (torch.rand(batch, steps) < 0.1).cuda())):
            order, unmarked = Order(cu_seqlens, resets, reverse), Order(cu_seqlens, None, reverse)
            kernels.linear_scan(a, b, initial, order)
            kernels.linear_scan_backward(a, b, initial, grad, grad_last, order)
            kernels.log_linear_scan(a, b, initial, unmarked)
            kernels.log_linear_scan_backward(a, b, b, initial, grad, None, unmarked)


def odd_rows(dtype):
    shapes = *scan_kernels.ODD, *scan_kernels.FEW, *scan_kernels.JOINED
    for reverse, (batch, steps, channels) in itertools.product(FLAGS, shapes):
        a, b, grad = (torch.rand(batch, steps, channels).to(dtype).cuda() for _ in range(3))
        for resets in (None, (torch.rand(batch, steps) < 0.1).cuda()):
            order = Order(None, resets, reverse)
            choose_backend("cuda", "cuda").linear_scan(a, b, None, order)
            choose_backend("cuda", "cuda").linear_scan_backward(a, b, None, grad, None, order)


def layers(dtype):
    bounds = torch.tensor([0, 4, 8, 11, 13, 15, 16], dtype=torch.int32).cuda()
    rows = {"batch": (4, 70), "time": (70, 4), "offsets": (16,)}
    for cell, layout, candidate in itertools.product(GATES, rows, ("positive", "linear", "tanh")):
        directions = 1 if layout == "batch" else 2
        for channels in (33, 64):
            pre = torch.randn(*rows[layout], directions * GATES[cell] * channels).to(dtype).cuda()
            bias = torch.randn(pre.shape[-1], dtype=torch.promote_types(dtype, torch.float32)).cuda()
            h0, h = torch.rand(directions, 4, channels), torch.rand(*rows[layout], directions * channels)
            h0, h = h0.to(dtype).cuda(), h.to(dtype).cuda()
            offsets = bounds if layout == "offsets" else None
            settings = (offsets, cell, candidate, layout == "batch", directions)
            layer("cuda", pre, bias, h0, *settings)
            layer_backward("cuda", pre, bias, h0, h, h, h0, *settings)


def scans_and_layers(geometry, dtype):
    with pytest.MonkeyPatch.context() as patch:
        scan_kernels.force(patch, geometry)
        scans(dtype, choose_backend("cuda", "cuda"))
        if "lanes" not in geometry:
            layers(dtype)


def compositions(dtype):
    for reverse, (batch, steps, channels) in itertools.product(FLAGS, ((2, 3000, 33), (1, 5000, 1), (1, 700, 128))):
        a, b = (torch.rand(batch, steps, channels, dtype=dtype).cuda() for _ in range(2))
        resets = (torch.rand(batch, steps) < 0.01).cuda()
        P, L = compose.compose(a, b, resets, reverse=reverse)
        compose.compose(a, b, reverse=reverse, before=True)
        compose.pass_on(P[None], L[None], torch.rand(batch, channels).cuda(), 0, reverse)


def nonlinear(cell, dtype):
    trace = test_nonlinear_recurrence.traced(cell)
    for shortest, packed, reverse in itertools.product((4, 64), FLAGS, FLAGS):  # chunks of four steps; one chunk
        shape = (1, 37, 45, 4) if packed else (3, 37, 45)
        initial, arguments = test_nonlinear_recurrence.inputs(cell, *shape, dtype=dtype)
        initial, arguments = [x.cuda() for x in initial], [x.cuda() for x in arguments]
        sequences, parameters = [x for x in arguments if x.dim() == 3], [x for x in arguments if x.dim() == 1]
        bounds = torch.tensor([0, 4, 4, 25, 37], dtype=torch.int32).cuda() if packed else None
        order = Order(bounds, (torch.rand(shape[:2]) < 0.1).cuda(), reverse)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps_cuda, "SHORTEST", shortest)
            call = Call(trace, sequences, parameters, initial, order)
            h, h_last = steps_cuda.steps(call)
            gradients = h, [h_last[0], None][: len(h)]
            results = [torch.empty_like(x) for x in sequences]
            steps_cuda.steps_backward(call, h, *gradients, results)


def projections(cell, dtype):
    # Channels of inputs and states end within tiles; sequences begin with tiles, within them, or come second.
    shapes = (1, 256, 64, 64, True), (3, 600, 72, 136, True), (37, 33, 64, 72, True), (517, 3, 8, 72, False)
    for first, second, inputs, hidden, batch_first in shapes:
        x = torch.randn(first, second, inputs).to(dtype).cuda()
        weight, bias = (torch.randn(GATES[cell] * hidden, *rest).to(dtype).cuda() for rest in ((inputs,), ()))
        h0 = torch.randn(first if batch_first else second, hidden).to(dtype).cuda()
        resets = (torch.rand(first, second) < 0.1).cuda()
        projected.scan(recurrence_of(cell, "positive", True), x, weight, bias, h0, None, batch_first)
        projected.scan(recurrence_of(cell, "positive", False), x, weight, None, None, resets, batch_first)


def single_steps(cell, dtype):
    trace = recurrence_of(cell, "positive", False)
    for batch, inputs, hidden in ((1, 33, 5), (3, 6, 33), (8, 64, 130), (20, 24, 9)):
        shapes = (batch, inputs), (GATES[cell] * hidden, inputs), (GATES[cell] * hidden,), (batch, hidden)
        x, weight, bias, h = (torch.randn(shape).to(dtype).cuda() for shape in shapes)
        step = recurrence_cuda.Step(trace, batch, inputs, hidden, dtype, 0)
        step(x, weight, bias, h)
        step(x, weight, None, None)


def recurrent_steps(cell, dtype):
    for batch, inputs, hidden in ((1, 33, 5), (3, 6, 34), (8, 64, 130), (20, 24, 9)):
        test_cuda_step.on_gpu(cell, *test_cuda_step.tensors(cell, batch, inputs, hidden, dtype, bias=hidden % 2 == 0))


def transpositions():
    for shape in ((1, 1), (130, 31), (33, 257), (256, 64)):
        gemm.transposed(torch.randn(shape).cuda())
        gemm.transposed(torch.randn(shape).cuda(), (torch.rand(shape[0]) < 0.5).cuda())


def shifts():
    for given in test_states_before.states_to_shift():
        persistent.previous(*map(test_states_before.on_gpu, given))


def sums_of_biases():
    for dtype, (batch, width) in itertools.product(persistent_cases.TOLERANCE, ((1, 4), (3, 132), (17, 2060))):
        for cell in ("lstm", "gru"):
            persistent.gradients_of_biases(torch.randn(batch, width).cuda(), dtype, cell)


def products_of_small_layers(sharers):
    test_small.forget_products()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "sharers_of", test_small.shared_by(sharers))
        for cell, size, (dtype, tf32) in itertools.product(test_small.CELLS, test_small.SIZES, test_small.TOLERANCE):
            given, h, found = test_small.inputs(cell, size, dtype)
            given, found = Arguments(*map(test_states_before.on_gpu, given)), [*map(test_states_before.on_gpu, found)]
            product, direction = (
                (given.x, given.weight_ih, given.bias_ih, None),
                (given, h.cuda(), found, test_small.ALL),
            )
            persistent.small.linear(tf32, product, product)
            persistent.small.gradients(tf32, direction, direction)


def recurrent(path, shape, in_clusters):
    pack = packing.pack

    def pack_on_cpu(mask, *rest):
        packed = pack(mask.cpu(), *rest)
        return packed._replace(**{k: x.cuda() for k, x in packed._asdict().items() if isinstance(x, torch.Tensor)})

    cuda_launch.pack = pack_on_cpu
    properties = torch.cuda.get_device_properties(0)
    back = persistent_geometries.candidates(path, *shape, properties=properties, backward=True)
    forwards = persistent_geometries.candidates(path, *shape, properties=properties)
    forward = min(forwards, key=lambda g: (g.distributed != in_clusters, microseconds(g, shape[2])))
    back = [g for g in back if (g.cluster > 1) == in_clusters]
    for chosen in {(g.cluster, g.distributed): g for g in back}.values():
        case = persistent_cases.Case(path, *shape, forward=forward, back=chosen)
        for steps, reverse, with_state, resets in ((6, False, True, 0), (2, True, False, 0), (6, True, True, 0.3)):
            inputs = case.inputs(steps, with_state=with_state, packed=reverse, resets=resets)
            try:
                case.forward(inputs, reverse)
                persistent.backward(*case.gradients(inputs, reverse))
            except MemoryError as error:  # only packing tells what fits
                print(error)
                break
        case.check()


def streamed(path, layer, in_clusters):
    properties = torch.cuda.get_device_properties(0)
    forward, *_ = persistent_geometries.streamed(path, *layer, properties=properties)
    backward = "sparse" if path == "block" else path
    for back in persistent_geometries.streamed(backward, *layer, properties=properties, backward=True):
        if (back.cluster > 1) == in_clusters:
            case = persistent_cases.Case(path, *layer, forward=forward, back=back)
            inputs = case.inputs(6, resets=0.3)
            case.forward(inputs, False)
            persistent.backward(*case.gradients(inputs, False))
            case.check()


def rounded(in_clusters):
    layer = "gru", 130, 20
    case, properties = persistent_cases.Case("dense", *layer, torch.float32), torch.cuda.get_device_properties(0)
    forwards, backwards = (persistent_geometries.rounded(*layer, back, properties) for back in FLAGS)
    backwards = [back for back in backwards if (back.cluster > 1) == in_clusters]
    for forward, back in itertools.zip_longest(forwards, backwards, fillvalue=forwards[0]):
        case.plan = case.plan._replace(geometry=cuda_plan.Geometries(forward, back))
        inputs = case.inputs(6, resets=0.3)
        case.forward(inputs, False)
        persistent.backward(*case.gradients(inputs, False))
        case.check()


def ping_pong(in_clusters, *layer):
    properties = torch.cuda.get_device_properties(0)
    forwards, backwards = (persistent_geometries.ping_pong(*layer, back, properties) for back in FLAGS)
    backwards = [back for back in backwards if (back.cluster > 1) == in_clusters]
    for forward, back in itertools.zip_longest(forwards, backwards):
        case = persistent_cases.Case("dense", *layer, forward=forward, back=back)
        for resets in (0, 0.3):
            inputs = case.inputs(6, resets=resets)
            case.forward(inputs, False)
            if back:
                case.backward(case.gradients(inputs, False))
        case.check()


def wide(hidden, dtype):
    layer = "lstm", hidden, 70, dtype
    properties = torch.cuda.get_device_properties(0)
    for forward, back in zip(*(persistent_geometries.wide(*layer, back, properties) for back in FLAGS), strict=True):
        case = persistent_cases.Case("dense", *layer, forward=forward, back=back)
        for packed, resets in ((False, 0), (True, 0.3)):
            inputs = case.inputs(6, packed=packed, resets=resets)
            case.forward(inputs, packed)
            case.backward(case.gradients(inputs, packed))
        case.check()


def weighted(in_clusters, block_groups, cell, *layer):
    """Kernels of a generated cell."""
    properties = torch.cuda.get_device_properties(0)
    for backward in FLAGS:
        found = persistent_geometries.generated(test_weighted.printed(cell), *layer, backward, properties=properties)
        for chosen in found:
            if (chosen.cluster > 1 or chosen.distributed, chosen.block_groups) != (in_clusters, block_groups):
                continue
            for packed, resets in ((False, 0.0), (True, 0.3)):
                case = test_weighted.Case(cell, *layer, steps=6, packed=packed, resets=resets, reverse=packed)
                run = case.backward if backward else case.forward
                run(Persistent(chosen))
    cuda_launch.check(0)


def heads(in_clusters, cell, width, count, batch, dtype):
    """Kernels of a generated cell for several heads, at once and one after another."""
    properties = torch.cuda.get_device_properties(0)
    for backward in FLAGS:
        layer = width // count, batch, dtype
        found = persistent_geometries.generated(test_weighted.printed(cell), *layer, backward, properties=properties)
        for chosen in (g for g in found if (g.cluster > 1 or g.distributed) == in_clusters):
            resident = chosen.blocks * chosen.groups * count <= properties.multi_processor_count
            for at_once in {1, count if resident else 1}:
                case = test_weighted.Case(cell, width, batch, dtype, 6, at_once == 1, 0.3, heads=count)
                run = case.backward if backward else case.forward
                run(Persistent(chosen._replace(heads=count, heads_at_once=at_once)))
    cuda_launch.check(0)


def stacks(cell):
    """Layers at once, whose chunks are parts of tensors; their products are cuBLAS's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "layers_at_once", lambda *_: 2)
        patch.setattr(persistent, "chunks", lambda *_: 3)
        stack = getattr(ostinato, cell)(10, 37, 3, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(61, 5, 10, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        output, _ = stack(x, resets=(torch.rand(61, 5) < 0.1).cuda())
        output.sum().backward()


def directions(kind, hidden, batch, dtype):
    """Both in one launch; their products are cuBLAS's, but those of small layers."""
    layer = getattr(ostinato, kind)(24, hidden, bidirectional=True, device="cuda", dtype=dtype)
    x = torch.randn(6, batch, 24, device="cuda", dtype=dtype, requires_grad=True)
    for resets in (None, (torch.rand(6, batch) < 0.3).cuda()):
        output, _ = layer(x, resets=resets)
        output.sum().backward()


PARTS = {
    f"scan-{geometry}-{dtype}".replace(" ", "-"): partial(scans_and_layers, geometry, dtype)
    for geometry, dtype in itertools.product(scan_kernels.GEOMETRIES, scan_kernels.TOLERANCE)
}
PARTS |= {f"odd-rows-{dtype}": partial(odd_rows, dtype) for dtype in (torch.float32, torch.bfloat16)}
PARTS |= {f"compose-{dtype}": partial(compositions, dtype) for dtype in (torch.float32, torch.float64)}
PARTS |= {
    f"steps-{cell}-{dtype}": partial(nonlinear, cell, dtype)
    for cell, dtype in itertools.product(test_nonlinear_recurrence.CELLS, test_nonlinear_recurrence.TOLERANCE)
}
PARTS |= {
    f"projected-{cell}-{dtype}": partial(projections, cell, dtype)
    for cell, dtype in itertools.product(GATES, test_projected.TOLERANCE)
}
PARTS |= {
    f"single-steps-{cell}-{dtype}": partial(single_steps, cell, dtype)
    for cell, dtype in itertools.product(GATES, scan_kernels.TOLERANCE)
}
PARTS |= {
    f"recurrent-steps-{cell}-{dtype}": partial(recurrent_steps, cell, dtype)
    for cell, dtype in itertools.product(plan.GATES, scan_kernels.TOLERANCE)
}
PARTS |= {f"clusters-stack-{cell}": partial(stacks, cell) for cell in ("RNN", "GRU", "LSTM")}
PARTS |= {
    f"clusters-directions-{kind}-{hidden}": partial(directions, kind, hidden, *others)
    for kind, hidden, *others in test_directions.LAYERS
}
PARTS["transposition"] = transpositions
PARTS["previous"] = shifts
PARTS["biases"] = sums_of_biases
for name, sharers in zip(
    ("small-layers-warps", "small-layers-blocks", "small-layers-clusters"), grouped.ADDING, strict=True
):
    PARTS[name] = partial(products_of_small_layers, sharers)
PARTS["wide-1152"] = partial(wide, 1152, torch.bfloat16)
PARTS["wide-2048"] = partial(wide, 2048, torch.float16)
for kind, in_clusters in {"persistent": False, "clusters": True}.items():
    PARTS[f"{kind}-rounded"] = partial(rounded, in_clusters)
    PARTS[f"{kind}-weighted"] = partial(weighted, in_clusters, 1, *test_weighted.SMALL)
    PARTS[f"{kind}-weighted-adjacent"] = partial(weighted, in_clusters, 1, *test_weighted.LARGE)
    for case in test_weighted.HEADS[:3]:
        PARTS[f"{kind}-heads-{case[2]}"] = partial(heads, in_clusters, *case)
    PARTS[f"{kind}-ping-pong-weighted"] = partial(weighted, in_clusters, 2, *test_weighted.LARGE)
    PARTS[f"{kind}-ping-pong"] = partial(ping_pong, in_clusters, "gru", 512, 128, torch.float16)
    PARTS[f"{kind}-ping-pong-rounded"] = partial(ping_pong, in_clusters, "lstm", 512, 64, torch.float32)
    for path, shape in persistent_cases.STREAMED:
        PARTS[f"{kind}-streamed-{path}-{shape[0]}"] = partial(streamed, path, shape, in_clusters)
    for path, shape in persistent_cases.LAYERS:
        PARTS["-".join(map(str, (kind, path, *shape))).replace(" ", "")] = partial(recurrent, path, shape, in_clusters)


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print(*PARTS, sep="\n")
    else:
        torch.manual_seed(0)
        for part in sys.argv[1:] or PARTS:
            print(part, flush=True)
            PARTS[part]()
        torch.cuda.synchronize()
