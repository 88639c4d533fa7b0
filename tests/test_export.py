"""Exported programs: in PyTorch's own operators, in ONNX's, and the errors where neither is possible."""

import contextlib
import copy
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

import ostinato
from ostinato.models import LanguageModel

SIZES = [(30, 3), (7, 2), (60, 5)]  # steps and sequences
DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


class Everything(nn.Module):
    """Every layer and scan, with and without states and resets, after a convolution that halves the steps."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 2, stride=2)
        self.rnn = ostinato.RNN(8, 8, nonlinearity="relu")
        self.gru = ostinato.GRU(8, 8, bias=False)
        self.lstm = ostinato.LSTM(8, 16, bidirectional=True)
        self.pruned = ostinato.prune(ostinato.GRU(32, 32, batch_first=True), 0.2, block=(16, 1))
        self.mingru = ostinato.MinGRU(32, 8, bidirectional=True, candidate="tanh")
        self.minlstm = ostinato.MinLSTM(16, 8)

    def forward(self, x, begins):
        x, begins = self.conv(x.permute(1, 2, 0)).permute(2, 0, 1), begins[::2] & begins[1::2]
        states = []
        for layer in (self.rnn, self.gru, self.lstm):
            x, after = layer(x)
            x, again = layer(x.repeat(1, 1, 2)[..., : layer.input_size], after, resets=begins)
            states += [after, again]
        x = self.pruned(x.transpose(0, 1))[0].transpose(0, 1)
        x, after = self.mingru(x)
        x, again = self.minlstm(x, after[:1])
        states += [after, again]
        a, b, begins = torch.sigmoid(x).transpose(0, 1), x.transpose(0, 1), begins.t()
        scans = ostinato.linear_scan(a, b, b[:, 0], reverse=True, resets=begins)
        logs = ostinato.log_linear_scan(a.log(), 100 * b, resets=begins)
        return x, states, scans, logs


def inputs(steps, batch):
    return torch.randn(steps - steps % 2, batch, 6), torch.rand(steps - steps % 2, batch) < 0.4


@pytest.fixture(scope="module")
def everything():
    torch.manual_seed(0)
    return Everything().eval()


def assert_trees_close(actual, expected):
    actual, expected = tree_leaves(actual), tree_leaves(expected)
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(x), y, rtol=1e-6, atol=1e-6)


def targets(program):
    modules = (module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    return {str(node.target) for module in modules for node in module.graph.nodes}


@torch.no_grad()
def test_portable_programs_equal_the_layers(everything):
    with ostinato.portable():
        program = torch.export.export(everything, inputs(20, 2), dynamic_shapes=(DYNAMIC, DYNAMIC))
    assert not [name for name in targets(program) if "ostinato" in name]
    for size in SIZES:
        given = inputs(*size)
        assert_trees_close(program.module()(*given), everything(*given))


class ModelAndLayer(nn.Module):
    """A language model of one block, and a pruned layer after it."""

    def __init__(self):
        super().__init__()
        self.model = LanguageModel(17, width=8, num_layers=1, cell="mingru", dropout=0.0)
        self.pruned = ostinato.prune(ostinato.GRU(17, 12, batch_first=True), 0.3)

    def forward(self, tokens):
        logits, state = self.model(tokens)
        return self.pruned(logits), state


def compiles_packages():
    """Before 2.13 PyTorch compiles no package of a loop that writes its outputs in place."""
    return bool(shutil.which("g++")) and torch.__version__ >= "2.13"


# What a C++ compiler would take its time for, and is none of this library: vector instructions, which are looked for by
# programs of their own, and an optimised wrapper.  Headers are included once each.
QUICKLY = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "cpp.vec_isa_ok": False,
}


@torch.no_grad()
def test_programs_where_this_library_is_not(tmp_path):
    """Portable ones run, also compiled; another names the library that it lacks."""
    model = ModelAndLayer().eval()
    with ostinato.portable():
        program = torch.export.export(model, (torch.zeros(2, 9, dtype=torch.int64),), dynamic_shapes=(DYNAMIC,))
    torch.export.save(program, tmp_path / "program.pt2")
    torch.export.save(torch.export.export(ostinato.MinGRU(3, 4), (torch.randn(5, 2, 3),)), tmp_path / "ours.pt2")
    if compiles_packages():  # a few layers only
        package = str(tmp_path / "package.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=QUICKLY)
    tokens = [torch.randint(17, (batch, steps)) for steps, batch in (*SIZES, (1, 1))]
    torch.save(tokens, tmp_path / "tokens.pt")
    code = """
import os, sys, torch
sys.modules["ostinato"] = None
os.chdir(sys.argv[1])
run = [torch.export.load("program.pt2").module()]
if os.path.exists("package.pt2"):
    run.append(torch._inductor.aoti_load_package("package.pt2"))
tokens = torch.load("tokens.pt")
with torch.no_grad():
    torch.save([[program(x) for x in tokens] for program in run], "results.pt")
torch.export.load("ours.pt2")
"""
    environment = os.environ | {"TORCHINDUCTOR_VEC_ISA_OK": "0"}  # as what loads a package looks for them, too
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (tmp_path / "results.pt").exists(), done.stderr
    assert done.returncode == 1
    assert "torch.ops.ostinato." in done.stderr
    assert "import the custom op" in done.stderr
    results, expected = torch.load(tmp_path / "results.pt"), [model(x) for x in tokens]
    assert len(results) == 1 + compiles_packages()
    for found in results:
        assert_trees_close(found, expected)


@torch.no_grad()
def test_onnx_has_the_layers_as_its_own(everything, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    program = torch.onnx.export(
        everything, inputs(20, 2), dynamic_shapes=(DYNAMIC, DYNAMIC), dynamo=True, verbose=False
    )
    operators = [node.op_type for node in program.model.graph.all_nodes()]
    assert {name: operators.count(name) for name in ("RNN", "GRU", "LSTM", "Scan")} == {
        "RNN": 1,
        "GRU": 2,
        "LSTM": 2,
        "Scan": 4 + 3 + 2,  # layers with resets, minimal layers, scans
    }
    program.save(tmp_path / "everything.onnx")
    session = runtime.InferenceSession(tmp_path / "everything.onnx")
    names = [given.name for given in session.get_inputs()]
    for size in SIZES:
        given = inputs(*size)
        results = session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})
        assert_trees_close(results, everything(*given))


class InDtype(nn.Module):
    """Layers in a dtype, called and answering in float32."""

    def __init__(self, dtype):
        super().__init__()
        kinds = ostinato.RNN, ostinato.GRU, ostinato.LSTM
        self.layers = nn.ModuleList(kind(6, 8, bidirectional=True) for kind in kinds).to(dtype)
        self.dtype = dtype

    def forward(self, x):
        return torch.stack([layer(x.to(self.dtype))[0].float() for layer in self.layers])


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, None)])
def test_onnx_has_the_layers_in_every_dtype(dtype, atol, tmp_path):
    runtime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model, path, x = InDtype(dtype).eval(), tmp_path / "model.onnx", torch.randn(7, 3, 6)
    torch.onnx.export(model, (torch.randn(20, 2, 6),), path, dynamic_shapes=(DYNAMIC,), dynamo=True, verbose=False)
    if atol is None:  # ONNX Runtime has no products in bfloat16 on a CPU
        onnx.checker.check_model(str(path), full_check=True)
    else:
        (output,) = runtime.InferenceSession(path).run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), model(x), rtol=0.0, atol=atol)


class Halved(nn.Module):
    """A layer of half as many steps as its input."""

    def __init__(self):
        super().__init__()
        self.conv, self.layer = nn.Conv1d(6, 8, 2, stride=2), ostinato.MinGRU(8, 4)

    def forward(self, x):
        return self.layer(self.conv(x.permute(1, 2, 0)).permute(2, 0, 1))[0]


def test_onnx_takes_multiples_of_a_size_and_parameters_that_train(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, shapes = Halved().eval(), ({0: 2 * Dim("half", min=2), 1: Dim("batch")},)
    torch.onnx.export(
        model, (torch.randn(20, 2, 6),), tmp_path / "halved.onnx", dynamic_shapes=shapes, dynamo=True, verbose=False
    )
    x = torch.randn(34, 3, 6)
    results = runtime.InferenceSession(tmp_path / "halved.onnx").run(None, {"x": x.numpy()})
    assert_trees_close(results, model(x))


class InSeries(nn.Sequential):
    """Layers with a state."""

    def forward(self, x):
        for layer in self:
            x, _ = layer(x)
        return x


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # the exporter's, that it is the older one
def test_the_older_onnx_exporter_takes_models_of_recurrent_layers(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    gru, lstm = ostinato.GRU(6, 16, 2, bidirectional=True), ostinato.prune(ostinato.LSTM(32, 32), 0.2, block=(16, 1))
    model, axes = InSeries(gru, lstm, ostinato.RNN(32, 8)).eval(), {"x": {0: "time", 1: "batch"}}
    x = torch.randn(20, 3, 6)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=False, input_names=["x"], dynamic_axes=axes)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for given in (x, torch.randn(34, 2, 6)):
        (output,) = session.run(None, {"x": given.numpy()})
        assert_trees_close(output, model(given))


@torch.no_grad()
def test_onnx_stays_finite_where_gates_are_shut(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer = ostinato.MinLSTM(3, 1, bias=False).eval()
    layer.weight_ih_l0.copy_(torch.eye(3))
    x = torch.tensor([[-200.0, -190.0, 1.0], [-150.0, -200.0, 2.0], [300.0, -300.0, 5.0]])
    torch.onnx.export(layer, (x,), tmp_path / "layer.onnx", dynamo=True, verbose=False)
    (output, _) = runtime.InferenceSession(tmp_path / "layer.onnx").run(None, {"input": x.numpy()})
    assert_trees_close(output, layer(x)[0])


class Projected(nn.Module):
    """A stack of LSTMs with projections, with states and resets and without."""

    def __init__(self, **options):
        super().__init__()
        self.lstm = ostinato.LSTM(6, 12, 2, proj_size=5, **options)

    def forward(self, x, begins, h, c):
        return self.lstm(x, (h, c), resets=begins), self.lstm(x)[0]

    def given(self, steps, batch):
        shape, layers = (batch, steps) if self.lstm.batch_first else (steps, batch), len(self.lstm._all_weights)
        states = torch.randn(layers, batch, 5), torch.randn(layers, batch, 12)
        return torch.randn(*shape, 6), torch.rand(shape) < 0.3, *states


OF_PROJECTED = {"dynamic_shapes": (DYNAMIC, DYNAMIC, {1: Dim.DYNAMIC}, {1: Dim.DYNAMIC})}


@pytest.mark.parametrize(
    ("where", "options"),
    [(contextlib.nullcontext, {"bias": False}), (ostinato.portable, {"bidirectional": True, "batch_first": True})],
)
def test_projections_are_exported_for_any_number_of_steps(where, options):
    torch.manual_seed(0)
    model = Projected(**options).eval()
    batch, time = Dim("batch"), Dim("time")
    of_steps = {0: batch, 1: time} if model.lstm.batch_first else {0: time, 1: batch}
    shapes = of_steps, of_steps, {1: batch}, {1: batch}
    with where():
        program = torch.export.export(model, model.given(20, 2), dynamic_shapes=shapes)
    assert not [name for name in targets(program) if "ostinato" in name]
    exported = program.module()
    with torch.no_grad():  # with gradients PyTorch compiles the loops at every call
        for size in (*SIZES, (1, 1), (4, 0)):
            given = model.given(*size)
            assert_trees_close(exported(*given), model(*given))
    given, found = model.given(7, 3), []
    for run in (exported, model):
        loss = sum(y.square().mean() for y in tree_leaves(run(*given)))
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert_trees_close(*found)


@torch.no_grad()
def test_projections_run_in_onnx(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = Projected(bidirectional=True).eval()
    torch.onnx.export(model, model.given(20, 2), tmp_path / "model.onnx", dynamo=True, verbose=False, **OF_PROJECTED)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    names = [argument.name for argument in session.get_inputs()]
    for size in (*SIZES, (1, 1)):
        given = model.given(*size)
        arrays = dict(zip(names, (x.numpy() for x in given), strict=True))
        assert_trees_close(session.run(None, arrays), model(*given))


class UnderAutocast(nn.Module):
    """A layer with resets whose own dtype is none that kernels take under autocast."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(6, 8, **options).double()

    def forward(self, x, begins):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x, resets=begins)


@pytest.mark.parametrize("kind", [ostinato.RNN, ostinato.GRU, ostinato.LSTM])
def test_resets_are_exported_where_no_kernel_takes_a_layer(kind):
    torch.manual_seed(0)
    model = UnderAutocast(kind, bidirectional=True)
    given = torch.randn(7, 3, 6, dtype=torch.float64), torch.rand(7, 3) < 0.4
    program = torch.export.export(model, given, dynamic_shapes=(DYNAMIC, DYNAMIC))
    assert_trees_close(program.module()(*given), model(*given))


def test_exported_projections_refuse_what_the_layer_does():
    layer, x, state = ostinato.LSTM(6, 12, proj_size=5), torch.randn(7, 3, 6), torch.zeros(1, 3, 12)
    with pytest.raises(RuntimeError, match=r"^Expected hidden\[0\] size \(1, 3, 5\), got \[1, 3, 12\]"):
        torch.export.export(layer, (x, (state, state)))
    with pytest.raises(RuntimeError, match=r"^input\.size\(-1\) must be equal to input_size"):
        torch.export.export(layer, (x[..., :4],))


@ostinato.recurrence
def doubling(h, x, u):
    return torch.clamp(2.0 * u * h, -1.0, 1.0) + x


LAYERS = {
    "RGLRU": (ostinato.RGLRU, {"batch_first": True}),
    "SRU": (ostinato.SRU, {"bidirectional": True}),
    "SLSTM": (ostinato.SLSTM, {"num_heads": 2}),
}


class FromStates(nn.Module):
    """A layer from states of ones, with resets."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, begins):
        batch = x.shape[0 if self.layer.batch_first else 1]
        ones = x.new_ones(self.layer.num_directions, batch, 8)
        return self.layer(x, ones if self.layer.states == 1 else (ones,) * self.layer.states, resets=begins)


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_recurrences_are_exported_for_any_number_of_steps(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    model = FromStates(kind(6, 8, **options)).eval()

    def given(steps, batch):
        shape = (batch, steps) if model.layer.batch_first else (steps, batch)
        return torch.randn(*shape, 6), torch.rand(shape) < 0.3

    with ostinato.portable():
        program = torch.export.export(model, given(20, 2), dynamic_shapes=(DYNAMIC, DYNAMIC))
    assert not [target for target in targets(program) if "ostinato" in target]
    shapes = {"dynamic_shapes": (DYNAMIC, DYNAMIC), "dynamo": True, "verbose": False}
    torch.onnx.export(model, given(20, 2), tmp_path / "layer.onnx", **shapes)
    session = runtime.InferenceSession(tmp_path / "layer.onnx")
    for size in (*SIZES, (1, 1)):
        x, begins = given(*size)
        expected = tree_leaves(copy.deepcopy(model).double()(x.double(), begins))
        names = [argument.name for argument in session.get_inputs()]
        arrays = dict(zip(names, (x.numpy(), begins.numpy()), strict=True))
        for results in (program.module()(x, begins), session.run(None, arrays)):
            results = [torch.as_tensor(y) for y in tree_leaves(results)]
            for y, exact in zip(results, expected, strict=True):
                torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_recurrences_are_exported_for_any_number_of_steps(backend):
    class Recurrences(nn.Module):
        def forward(self, x, u):
            h, last = doubling(x, u, h0=x[:, 0], reverse=True, backend=backend)
            scanned, end = ostinato.linear_scan(torch.polar(x.sigmoid(), x), x, backend=backend)
            return h, last, torch.view_as_real(scanned), torch.view_as_real(end)

    def given(batch, steps):
        return torch.randn(batch, steps, 4), torch.rand(4)

    with ostinato.portable():
        program = torch.export.export(Recurrences(), given(2, 20), dynamic_shapes=(DYNAMIC, None))
    assert not [target for target in targets(program) if "ostinato" in target]
    for size in ((1, 1), (3, 7), (2, 60)):
        x, u = given(*size)
        assert_trees_close(program.module()(x, u), Recurrences()(x, u))


class Jump(torch.autograd.Function):
    """A step whose derivative is that of the identity."""

    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


class WithWeights(nn.Module):
    """A cell that takes weights, one of them computed, a buffer and a plain tensor from around its function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.norm = nn.LayerNorm(4)
        self.register_buffer("scale", torch.tensor(0.7))
        self.decay = torch.linspace(0.1, 0.9, 4)
        self.fires = Jump.apply
        self.cell = ostinato.recurrence(self.of_two)

    def of_two(self, state, x):
        h, c = state
        gate, value = self.weight.chunk(2)
        c = self.decay * c + self.fires(self.linear(h) + x) * torch.sigmoid(h @ gate.T)
        return torch.tanh(self.norm(c) + h @ value.T) * self.scale, c

    def forward(self, x, begins):
        return self.cell(x, resets=begins, reverse=True, backend="torch")


def inputs_of_four(batch, steps):
    return torch.randn(batch, steps, 4), torch.rand(batch, steps) < 0.2


@pytest.mark.parametrize(("where", "grad"), [(ostinato.portable, False), (contextlib.nullcontext, True)])
def test_recurrences_with_weights_are_exported_for_any_number_of_steps(where, grad):
    torch.manual_seed(0)
    model = WithWeights().eval()
    with torch.set_grad_enabled(grad), where():
        program = torch.export.export(model, inputs_of_four(2, 20), dynamic_shapes=(DYNAMIC, DYNAMIC))
    assert not [name for name in targets(program) if "ostinato" in name]
    exported = program.module()
    with torch.no_grad():  # with gradients PyTorch compiles the loops at every call
        for run in (exported, program.run_decompositions().module()):
            for size in (*SIZES, (1, 1)):
                given = inputs_of_four(*size)
                assert_trees_close(run(*given), model(*given))
        model.weight.neg_()  # a parameter of the program, too
        assert_trees_close(exported(*given), model(*given))


def test_programs_of_recurrences_with_weights_have_gradients():
    torch.manual_seed(0)
    model, given, gradients = WithWeights(), inputs_of_four(3, 7), []
    model.fires = torch.sigmoid  # programs keep no derivatives of one's own
    program = torch.export.export(model, inputs_of_four(2, 20), dynamic_shapes=(DYNAMIC, DYNAMIC)).module()
    for run in (program, model):
        gradients.append(torch.autograd.grad(run(*given)[0][0].square().mean(), list(model.parameters())))
    assert_trees_close(*gradients)


def test_recurrences_with_weights_run_in_onnx(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = WithWeights().eval()
    shapes = {"dynamic_shapes": (DYNAMIC, DYNAMIC), "dynamo": True, "verbose": False}
    torch.onnx.export(model, inputs_of_four(2, 20), tmp_path / "cell.onnx", **shapes)
    session = runtime.InferenceSession(tmp_path / "cell.onnx")
    names = [argument.name for argument in session.get_inputs()]
    for size in (*SIZES, (1, 1)):
        given = inputs_of_four(*size)
        arrays = dict(zip(names, (x.numpy() for x in given), strict=True))
        assert_trees_close(session.run(None, arrays), model(*given))


@ostinato.recurrence
def of_two_steps_before(state, x):
    h, before = state
    return torch.tanh(h + 0.5 * before + x), h


@ostinato.recurrence
def same_twice(state, x):
    h, c = state
    both = torch.tanh(h - c + x)
    return both, both


@ostinato.recurrence
def of_parameters(state, x, u):
    h, c = state
    return torch.sigmoid(u), h * c + x


class Begun(nn.Module):
    """A scan, recurrences and a layer from a state that is laid out by columns, and used more than once."""

    def __init__(self):
        super().__init__()
        self.gru = ostinato.GRU(4, 4)

    def forward(self, x, u, begin):
        h0 = begin.t()
        both = h0, h0
        recurrences = of_two_steps_before(x, h0=both), same_twice(x, h0=both), of_parameters(x, u, h0=both)
        return recurrences, self.gru(x.transpose(0, 1), h0[None]), ostinato.linear_scan(x.sigmoid(), x, h0)


@torch.no_grad()
def test_states_of_any_layout_and_returned_as_given_are_exported(tmp_path):
    torch.manual_seed(0)
    model, given = Begun().eval(), (torch.randn(3, 6, 4), torch.randn(4), torch.randn(4, 3))
    with ostinato.portable():
        program = torch.export.export(model, given)
    assert_trees_close(program.module()(*given), model(*given))
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.onnx.export(model, given, tmp_path / "begun.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "begun.onnx")
    names = [argument.name for argument in session.get_inputs()]
    arrays = dict(zip(names, (x.numpy() for x in given), strict=True))
    assert_trees_close([torch.as_tensor(y) for y in session.run(None, arrays)], model(*given))


@torch.no_grad()
def test_onnx_functions_keep_small_results(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    @ostinato.recurrence
    def small(x):
        return torch.expm1(x), torch.log1p(x)

    class Small(nn.Module):
        def forward(self, x):
            return small(x)[0]

    x = torch.cat([torch.logspace(-30, 0, 40), -torch.logspace(-30, -0.5, 40), torch.tensor([0.0, 50.0])])
    x = torch.stack([torch.zeros_like(x), x])[None]  # the second state is b[1]
    torch.onnx.export(Small().eval(), (x,), tmp_path / "small.onnx", dynamo=True, verbose=False)
    (h,) = runtime.InferenceSession(tmp_path / "small.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(h)[0, 1].double(), x[0, 1].double().log1p(), rtol=5e-7, atol=0.0)
    begun = torch.stack([x[0, 1] * 0.0 + 1.0, x[0, 1]])[None]
    (h,) = runtime.InferenceSession(tmp_path / "small.onnx").run(None, {"x": begun.numpy()})
    exact = begun[0, 1].double().expm1() * math.log(2.0) + begun[0, 1].double().log1p()
    torch.testing.assert_close(torch.from_numpy(h)[0, 1].double(), exact, rtol=1e-6, atol=0.0)


@torch.no_grad()
def test_onnx_has_angles_and_remainders(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    @ostinato.recurrence
    def winding(x, y):
        return torch.hypot(x, y) / 8 - x.round() / 8, torch.atan2(x, y) + torch.remainder(x, 0.75) + y.floor()

    class Winding(nn.Module):
        def forward(self, x, y):
            return winding(x, y)[0]

    torch.manual_seed(0)
    x, y = 2 * torch.randn(2, 1, 6, 40)
    x[0, :, 0], y[0, :, :2] = 0.0, 0.0
    torch.onnx.export(Winding().eval(), (x, y), tmp_path / "winding.onnx", dynamo=True, verbose=False)
    (h,) = runtime.InferenceSession(tmp_path / "winding.onnx").run(None, {"x": x.numpy(), "y": y.numpy()})
    torch.testing.assert_close(torch.from_numpy(h), winding(x, y, backend="reference")[0])


@ostinato.recurrence
def turning(x, magnitude, angle):
    return torch.polar(torch.sigmoid(magnitude), angle), x


class Turning(nn.Module):
    """A recurrence with complex coefficients."""

    def forward(self, magnitude, angle):
        h, last = turning(torch.complex(magnitude, angle), magnitude, angle)
        return torch.view_as_real(h), torch.view_as_real(last)


@torch.no_grad()
def test_complex_recurrences_run_in_onnx(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model, path = Turning(), tmp_path / "model.onnx"
    shapes = {"dynamic_shapes": (DYNAMIC, DYNAMIC), "dynamo": True, "verbose": False}
    torch.onnx.export(model, tuple(torch.randn(2, 2, 20, 4)), path, **shapes)
    session = runtime.InferenceSession(path)
    for batch, steps in ((3, 7), (1, 1)):
        magnitude, angle = torch.randn(2, batch, steps, 4)
        results = session.run(None, {"magnitude": magnitude.numpy(), "angle": angle.numpy()})
        assert_trees_close(results, model(magnitude, angle))


@pytest.mark.parametrize("make", [ostinato.GRU, ostinato.MinGRU])
def test_packed_sequences_are_exported(make):
    """With an initial state, or by PyTorch's compiler; not if the model packs them."""
    layer, state = make(3, 4, num_layers=2), torch.randn(2, 2, 4)
    packed, other = (pack_padded_sequence(torch.randn(5, 2, 3), [5, 3]) for _ in range(2))
    for strict, given in ((False, (state,)), (True, ())):
        program = torch.export.export(layer, (packed, *given), strict=strict).module()
        assert_trees_close(program(other, *given)[0].data, layer(other, *given)[0].data)
    with pytest.raises(NotImplementedError, match=r"^torch\.export needs an initial state for packed sequences"):
        torch.export.export(layer, (packed,), strict=False)

    class Packing(nn.Module):
        def forward(self, x, lengths, state):
            return layer(pack_padded_sequence(x, lengths), state)[0].data

    with pytest.raises(NotImplementedError, match=r"^torch\.export cannot trace how a model packs sequences"):
        torch.export.export(Packing(), (torch.randn(5, 2, 3), torch.tensor([5, 3]), state), strict=False)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_cannot_be_exported_says_so():
    layer = ostinato.MinGRU(3, 4)

    class Packed(nn.Module):
        def forward(self, x, cu_seqlens):
            return ostinato.linear_scan(x, x, cu_seqlens=cu_seqlens)

    given = torch.randn(1, 6, 2), torch.tensor([0, 2, 6], dtype=torch.int32)
    with ostinato.portable(), pytest.raises(NotImplementedError, match=r"^packed sequences need this library .*$"):
        torch.export.export(Packed(), given)
    with (
        ostinato.portable(),
        pytest.raises(NotImplementedError, match=r"^\w+ is written in PyTorch's own "),
    ):
        torch.jit.trace(layer, (torch.randn(5, 2, 3),))
    assert layer(torch.randn(5, 2, 3))[0].shape == (5, 2, 4)


@pytest.mark.parametrize("layer", [ostinato.MinLSTM(3, 4), ostinato.MinGRUCell(3, 4)])
def test_scripting_says_what_to_use(layer):
    message = f"^torch.jit.script cannot compile {type(layer).__name__}: use torch.export.export$"
    for module in (layer, nn.Sequential(nn.Linear(3, 3), layer)):
        with pytest.raises(NotImplementedError, match=message):
            torch.jit.script(module)
