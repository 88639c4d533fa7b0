"""Every call of RNN, GRU and LSTM reads the current weights, and none that are pruned."""

import copy
import multiprocessing
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ostinato
from comparisons import same_bits
from ostinato.masks import masked
from ostinato.recurrent.weights import weights_of
from recurrent_layers import (
    assert_close_to_exact,
    assert_gradients_close,
    assert_results_close,
    by,
    flat,
    inputs,
    pruned,
    twin,
)


def step_of_optimiser(layer, x):
    layer(x)[0].sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()


def step_of_fused_optimiser(layer, x):
    """Which leaves the count of changes that PyTorch keeps of each tensor as it is."""
    layer(x)[0].sum().backward()
    with torch.no_grad():
        layer(x)  # packs the weights anew
    version = layer.weight_ih_l0._version
    torch.optim.AdamW(layer.parameters(), 0.1, fused=True).step()
    assert layer.weight_ih_l0._version == version


def assign_data(layer, x):
    layer.weight_hh_l0.data = layer.weight_hh_l0.data * 1.5


def edit_data(layer, x):
    """As moving averages and soft updates do; PyTorch counts no change."""
    version = layer.weight_hh_l0._version
    layer.weight_hh_l0.data.mul_(1.5)
    assert layer.weight_hh_l0._version == version


def edit_in_another_process(layer, x):
    layer.share_memory()
    child = multiprocessing.get_context("fork").Process(target=edit_bytes, args=(layer.bias_ih_l0.detach().numpy(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child.start()
    child.join(60)


def edit_bytes(array):
    array += 0.5


CHANGES = {
    "optimiser": step_of_optimiser,
    "fused optimiser": step_of_fused_optimiser,
    "load_state_dict": lambda layer, x: layer.load_state_dict({k: v / 2 for k, v in layer.state_dict().items()}),
    "in place": torch.no_grad()(lambda layer, x: layer.weight_hh_l0.mul_(1.5)),
    "bias in place": torch.no_grad()(lambda layer, x: layer.bias_hh_l0.add_(0.5)),
    "input weight in place": torch.no_grad()(lambda layer, x: layer.weight_ih_l0.mul_(1.5)),
    "other parameter": lambda layer, x: setattr(layer, "weight_hh_l0", nn.Parameter(layer.weight_hh_l0 * 1.5)),
    "data assigned": assign_data,
    "data edited": edit_data,
    "another process": edit_in_another_process,
    "rounded": lambda layer, x: layer.to(torch.bfloat16).to(torch.float32),
    "mask in place": lambda layer, x: layer.mask_hh_l0.logical_and_(layer.mask_hh_l0.roll(16, 1)),
    "pruned again": lambda layer, x: ostinato.prune(layer, 0.02),
}


def without_inference(change):
    return "optimiser" in change or change in ("data edited", "another process")


@by("the CPU's")
@pytest.mark.parametrize(
    ("change", "inference"),
    [(change, mode) for change in CHANGES for mode in (False, True) if not mode or not without_inference(change)],
)
def test_changed_weights_are_noticed(change, inference):
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        layer = pruned("GRU", 5, 32)
        x, hx = inputs(layer, 2)
    with torch.inference_mode():
        before = layer(x, hx)[0]
    with torch.inference_mode(inference):
        CHANGES[change](layer, x)
        layer_zeros = copy.deepcopy(layer)
        with torch.no_grad():
            layer_zeros.weight_hh_l0.masked_fill_(~layer_zeros.mask_hh_l0, 0)
        expected = twin(layer_zeros)(x, hx)
    with torch.inference_mode():
        after = layer(x, hx)
    assert_results_close(after, expected, 1e-6)
    assert (after[0] - before).abs().max() > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change", [change for change in CHANGES if change != "another process"]
)  # shares no GPU memory
def test_gpu_changed_weights_are_noticed(change):
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 32, device="cuda")
    x, hx = inputs(layer, 2, device="cuda")
    with torch.no_grad():
        layer(x, hx)
    CHANGES[change](layer, x)
    with torch.no_grad():
        layer.weight_hh_l0.masked_fill_(~layer.mask_hh_l0, 0)
        assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-3)


@pytest.mark.gpu
def test_gpu_dense_weights_changed_by_a_fused_optimiser_are_noticed():
    torch.manual_seed(0)
    layer = ostinato.LSTM(5, 32, device="cuda")
    x, hx = inputs(layer, 2, device="cuda")
    for _ in range(3):
        layer(x, hx)[0].sum().backward()
        with torch.no_grad():
            layer(x, hx)
        torch.optim.AdamW(layer.parameters(), 0.1, fused=True).step()
        with torch.no_grad():
            exact = twin(layer).double()(x.double(), tuple(state.double() for state in hx))
            assert_close_to_exact(layer(x, hx), exact, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}, {"proj_size": 8}])
def test_gpu_weights_lie_in_one_buffer(settings, dtype):
    torch.manual_seed(0)
    x = torch.randn(4, 2, 16, device="cuda", dtype=dtype)
    for layer_type in (ostinato.LSTM,) if "proj_size" in settings else (ostinato.RNN, ostinato.GRU, ostinato.LSTM):
        layer, made_there = (layer_type(16, 32, **settings, device=device, dtype=dtype) for device in ("cpu", "cuda"))
        layer.to("cuda")
        made_there.load_state_dict(layer.state_dict())
        apart = copy.deepcopy(layer)
        for name, weight in layer.named_parameters():
            setattr(apart, name, nn.Parameter(weight.detach().clone()))
        assert [buffers(module) for module in (layer, made_there, apart)] == [1, 1, len(list(layer.parameters()))]
        for _ in range(2):  # with the weights as they are, and after a step in place
            results = []
            for module in (layer, made_there, apart):
                output = module._forward_torch(x, None, weights_of(module))[0]
                gradients = torch.autograd.grad(output.sum(), list(module.parameters()))
                torch._foreach_add_([weight.detach() for weight in module.parameters()], gradients, alpha=-0.1)
                results.append([output, *gradients])
            assert same_bits(results[0], results[1])
            assert same_bits(results[0], results[2])


def buffers(layer):
    return len({weight.untyped_storage().data_ptr() for weight in layer.parameters()})


def test_memory_of_an_old_weight_is_not_mistaken_for_it():
    layer = pruned("RNN", 5, 32)
    x, hx = inputs(layer, 1)
    with torch.no_grad():
        for factor in range(1, 20):  # the allocator would give back an address it has given before
            layer.weight_hh_l0.data = torch.full_like(layer.weight_hh_l0, factor / 100) * layer.mask_hh_l0
            assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-6)


def test_a_pruned_weight_does_not_count_whatever_it_holds():
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 32)
    x, hx = inputs(layer, 3)
    expected = flat(twin(layer)(x, hx))
    with torch.no_grad():
        layer.weight_hh_l0[~layer.mask_hh_l0] = float("nan")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for ours, theirs in zip(flat(layer(x, hx)), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["dense", "block", "sparse"])
def test_gpu_pruned_weights_count_as_zero_whatever_they_are(path):
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 64, num_layers=2, device="cuda")
    layer._forced_path = path
    x, hx = inputs(layer, 4, device="cuda")
    assert layer.plan(4).path == path
    with torch.no_grad():
        expected = layer(x, hx)
        assert_results_close(expected, twin(layer)(x, hx), 1e-3)
    for name in ("weight_hh_l0", "weight_hh_l1"):
        getattr(layer, name).data.masked_fill_(~getattr(layer, name.replace("weight", "mask")), torch.nan)
    with torch.no_grad():
        assert_results_close(layer(x, hx), expected, 0)
    assert_results_close(layer(x, hx), expected, 1e-5)  # for gradients other kernels may be chosen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masked_weights_are_the_same_with_and_without_gradient(dtype):
    layer = pruned("GRU", 5, 32).to(dtype)
    with torch.no_grad():
        odd = torch.tensor([float("nan"), float("inf"), -0.0, 1.5], dtype=dtype)
        layer.weight_hh_l0.copy_(odd.repeat(layer.weight_hh_l0.numel() // 4).view_as(layer.weight_hh_l0))
        ours = masked(layer, "weight_hh_l0")
        assert not ours.requires_grad
    expected = masked(layer, "weight_hh_l0")
    assert expected.requires_grad
    torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours[~layer.mask_hh_l0], torch.zeros_like(ours[~layer.mask_hh_l0]))


class OneDraw(nn.Module):
    """Other weights whenever they are asked for."""

    def __init__(self):
        super().__init__()
        self.draws = []

    def forward(self, weight):
        self.draws.append(weight * torch.rand(()))
        return self.draws[-1]


@by("as planned")
@pytest.mark.parametrize("steps", [1, 4, 60])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_sequence_has_one_draw_of_random_weights(kind, steps):
    layer, drawn = getattr(ostinato, kind)(5, 16), OneDraw()
    (x, hx), expected = inputs(layer, 1, steps), twin(layer)
    nn.utils.parametrize.register_parametrization(layer, "weight_hh_l0", drawn)
    drawn.draws.clear()
    with torch.no_grad():
        output, errors = layer(x, hx)[0], []
        for weight in drawn.draws:
            expected.weight_hh_l0.copy_(weight)
            errors.append((expected(x, hx)[0] - output).abs().max())
    assert min(errors) < 1e-6


def dropping(base):
    """A class whose calls drop recurrent weights, by a list of others in the place of ``torch.nn``'s own."""

    class Dropping(base):
        def forward(self, input, hx=None):
            listed, names = self._flat_weights, self._flat_weights_names
            torch.manual_seed(7)
            self._flat_weights = [F.dropout(w) if "_hh_" in name else w for w, name in zip(listed, names, strict=True)]
            self.flatten_parameters()
            try:
                return super().forward(input, hx)
            finally:
                self._flat_weights = listed

    return Dropping


@by("as planned", "reference")
@pytest.mark.parametrize("steps", [1, 4, 30])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_weights_in_the_private_list_count_as_in_torch(kind, steps):
    layer = dropping(getattr(ostinato, kind))(5, 16, 2, dtype=torch.float64)
    other = dropping(getattr(nn, kind))(5, 16, 2, dtype=torch.float64)
    x, hx = inputs(layer, 3, steps)
    for parameters in (None, {name: 1.5 * weight for name, weight in other.state_dict().items()}):
        if parameters is None:
            layer.load_state_dict(other.state_dict())
        else:  # as new parameters
            layer.load_state_dict(parameters, assign=True)
            other.load_state_dict(parameters)
        with torch.no_grad():
            assert_results_close(layer(x, hx), other(x, hx), 1e-12)
        assert_gradients_close(layer, other, x, hx)
    copied = copy.deepcopy(layer)
    assert_results_close(copied(x, hx), other(x, hx), 1e-12)


def scaling(base):
    """A class that scales recurrent weights in the list that ``torch.nn`` makes of them, as adapters add to them."""

    class Scaling(base):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=self.weight_hh_l0.dtype))
            self.draw = False
            self._init_flat_weights()

        def _init_flat_weights(self):
            super()._init_flat_weights()
            if hasattr(self, "scale"):
                scale = self.scale * torch.rand(()) if self.draw else self.scale
                weights = zip(self._flat_weights, self._flat_weights_names, strict=True)
                self._flat_weights = [scale * weight if "_hh_" in name else weight for weight, name in weights]
                self._flat_weight_refs = [weakref.ref(weight) for weight in self._flat_weights]

    return Scaling


@by("as planned", "reference")
@pytest.mark.parametrize("steps", [1, 4, 30])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_private_list_that_a_class_computes_counts_as_in_torch(kind, steps):
    layer = scaling(getattr(ostinato, kind))(5, 16, 2, dtype=torch.float64)
    other = scaling(getattr(nn, kind))(5, 16, 2, dtype=torch.float64)
    layer.load_state_dict(other.state_dict())
    x, hx = inputs(layer, 3, steps)
    for scale in (1.5, 0.5):
        with torch.no_grad():
            layer.scale.fill_(scale)
            other.scale.fill_(scale)
            assert_results_close(layer(x, hx), other(x, hx), 1e-12)
        assert_gradients_close(layer, other, x, hx)


def calling_torch(base):
    """A class with a forward of its own, which reads the list of weights as ``torch.nn``'s does."""

    class CallingTorch(base):
        def forward(self, input, hx):
            self._update_flat_weights()
            how = self.bias, self.num_layers, self.dropout, self.training, self.bidirectional, self.batch_first
            function = getattr(torch._VF, self.mode.lower())
            output, *states = function(input, hx, self._flat_weights, *how)
            return output, tuple(states) if self.mode == "LSTM" else states[0]

    return CallingTorch


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_forward_that_reads_the_private_list_finds_the_weights_of_the_call(kind):
    layer, other = (calling_torch(getattr(where, kind))(5, 16, 2, dtype=torch.float64) for where in (ostinato, nn))
    layer.load_state_dict(other.state_dict())
    x, hx = inputs(layer, 3)
    weights = {name: 1.5 * weight for name, weight in other.state_dict().items()}
    expected = torch.func.functional_call(other, weights, (x, hx))
    assert_results_close(torch.func.functional_call(layer, weights, (x, hx)), expected, 1e-12)
    assert_results_close(layer(x, hx), other(x, hx), 1e-12)
    for module in (layer, other):
        nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    assert_gradients_close(layer, other, x, hx)


@by("as planned")
@pytest.mark.parametrize("steps", [1, 4, 60])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_sequence_has_one_draw_of_a_private_list(kind, steps):
    layer, expected = scaling(getattr(ostinato, kind))(5, 16), getattr(nn, kind)(5, 16)
    x, hx = inputs(layer, 1, steps)
    layer.draw = True
    with torch.no_grad():
        result = layer(x, hx)
        for weight, drawn in zip(expected.parameters(), layer._flat_weights, strict=True):
            weight.copy_(drawn)
        assert_results_close(result, expected(x, hx), 1e-6)


@pytest.mark.parametrize("density", [None, 0.5])
def test_weights_in_the_private_list_of_a_pruned_layer_are_masked(density):
    layer = ostinato.LSTM(5, 16)
    if density is not None:
        ostinato.prune(layer, density)
    x, hx = inputs(layer, 3)
    layer._flat_weights = [1.5 * weight for weight in layer._flat_weights]
    expected = twin(layer)
    expected.load_state_dict({name: 1.5 * weight for name, weight in layer.named_parameters()})
    assert_results_close(layer(x, hx), expected(x, hx), 1e-6)


@by("as planned")
def test_weights_in_the_private_list_count_where_parameters_were_deleted():
    layer, expected = ostinato.GRU(5, 16, 2), nn.GRU(5, 16, 2)
    x, hx = inputs(layer, 3)
    generated = {name: weight.detach() for name, weight in expected.named_parameters()}
    for name in generated:
        delattr(layer, name)
    with pytest.raises(AttributeError, match="no attribute 'weight_ih_l0'"):
        layer(x, hx)
    layer._flat_weights = list(generated.values())
    assert_results_close(layer(x, hx), expected(x, hx), 1e-6)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_weights_in_the_private_list_count_where_compiled(kind, fresh_compiler):
    layer = dropping(getattr(ostinato, kind))(5, 16, 2, dtype=torch.float64)
    x, hx = inputs(layer, 3)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(layer, backend="aot_eager")
        assert_results_close(compiled(x, hx), layer(x, hx), 1e-12)
        assert_gradients_close(compiled, layer, x, hx)
