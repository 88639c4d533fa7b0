"""Which of PyTorch's switches decide whether float32 may be rounded to tf32."""

import pytest
import torch

from ostinato.kernels.matmul import cublas
from ostinato.kernels.matmul.precision import layers_allow_tf32, product_switches, products_allow_tf32

CUDA, f32 = torch.device("cuda"), torch.float32


@pytest.fixture(autouse=True)
def as_they_were():
    libraries = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [library.allow_tf32 for library in libraries]
    yield
    for library, allowed in zip(libraries, before, strict=True):
        library.allow_tf32 = allowed


@pytest.mark.parametrize("loaded", [True, False])
def test_layers_have_the_switch_of_torchs_layers_by_old_and_new_names(loaded, monkeypatch):
    monkeypatch.setattr(cublas, "is_loaded", lambda: loaded)  # without, products can only follow PyTorch's
    products, layers = torch.backends.cuda.matmul, torch.backends.cudnn
    for of_products, of_layers in ((True, False), (False, True), (True, True), (False, False)):
        products.allow_tf32, layers.allow_tf32 = of_products, of_layers
        assert products_allow_tf32() == of_products
        assert layers_allow_tf32(CUDA, f32) == (of_layers if loaded else of_products)
        assert not layers_allow_tf32(torch.device("cpu"), f32)
        assert not layers_allow_tf32(CUDA, torch.bfloat16)
    conv, rnn = layers.conv.fp32_precision, layers.rnn.fp32_precision
    layers.conv.fp32_precision, layers.rnn.fp32_precision = "ieee", "tf32"  # the old name cannot say that
    assert layers_allow_tf32(CUDA, f32) == loaded
    layers.conv.fp32_precision, layers.rnn.fp32_precision = conv, rnn


SWITCHES = "tf32", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation"


@pytest.mark.parametrize("switch", SWITCHES)
def test_all_switches_of_products_count(switch):
    products, name, seen = torch.backends.cuda.matmul, f"allow_{switch}", product_switches()
    before = getattr(products, name)
    try:
        setattr(products, name, not before)
        assert product_switches() != seen
    finally:
        setattr(products, name, before)
    assert product_switches() == seen
