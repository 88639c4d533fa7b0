"""RecurrentGemma with its loop over time replaced: the same outputs and gradients, many times faster.

The RG-LRU of Hugging Face's RecurrentGemma runs one step after another in Python.  Here its equation becomes a
recurrence, and a method of a few lines replaces the one that contains the loop.  Needs ``pip install transformers``.
"""

import copy
import time
from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

import ostinato


@ostinato.recurrence
def rg_lru(x: Tensor, i: Tensor, r: Tensor, position: Tensor, log_lambda: Tensor) -> tuple[Tensor, Tensor]:
    log_a = -8 * torch.sigmoid(r) * F.softplus(log_lambda)
    root = torch.sqrt(1e-37 - torch.expm1(2 * log_a))  # never of 0, where its derivative is infinite
    scale = torch.where(position == 0, 1.0, root)  # the first input is not scaled
    return torch.exp(log_a), scale * torch.sigmoid(i) * x


def block_diagonal(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Multiply (B, T, W) by n matrices (n, W/n, W/n), each of which maps its own part of the channels."""
    return (torch.einsum("btni,nij->btnj", x.unflatten(-1, (len(weight), -1)), weight) + bias).flatten(-2)


def forward(self: RecurrentGemmaRglru, activations: Tensor, position_ids: Tensor) -> Tensor:
    """Replacement of ``RecurrentGemmaRglru.forward``."""
    position_ids = position_ids.expand(activations.shape[:2])
    h, h_last = rg_lru(
        activations,
        block_diagonal(activations, self.input_gate_weight, self.input_gate_bias),
        block_diagonal(activations, self.recurrent_gate_weight, self.recurrent_gate_bias),
        position_ids[:, :, None].to(activations.dtype).expand_as(activations),
        self.recurrent_param,
        h0=self.recurrent_states,
        resets=position_ids == 0,
    )
    self.recurrent_states = h_last.float() if self.recurrent_states is not None else None
    return h


def without_loops(model: nn.Module) -> nn.Module:
    """Return a copy of the model whose RG-LRUs are recurrences."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, RecurrentGemmaRglru):
            module.forward = MethodType(forward, module)
    return model


def small_model() -> RecurrentGemmaForCausalLM:
    """Make a model of two recurrent blocks and one attention block, with random weights."""
    config = RecurrentGemmaConfig(
        num_hidden_layers=3,
        vocab_size=256,
        hidden_size=128,
        lru_width=128,
        intermediate_size=384,
        num_attention_heads=4,
        attention_window_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = RecurrentGemmaForCausalLM(config)
    with torch.no_grad():  # transformers leaves the weights of a new RG-LRU uninitialised
        for name, parameter in model.named_parameters():
            if "recurrent_param" in name:
                parameter.uniform_(-6, -4)
            elif "rg_lru" in name:
                parameter.normal_(std=0.2)
    return model


def logits_and_gradients(model: nn.Module, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    output = model(tokens, labels=tokens, use_cache=False)
    return output.logits.detach(), list(torch.autograd.grad(output.loss, list(model.parameters())))


def training_step(model: nn.Module, tokens: Tensor) -> None:
    logits_and_gradients(model, tokens)


def rg_lru_alone(model: nn.Module, tokens: Tensor) -> None:
    """Run the forward and backward pass of a single RG-LRU over as many steps."""
    (first, *_) = (module for module in model.modules() if isinstance(module, RecurrentGemmaRglru))
    first.recurrent_states = None
    x = torch.randn(*tokens.shape, len(first.recurrent_param), device=tokens.device)
    h = first(x, torch.arange(tokens.shape[1], device=tokens.device)[None])
    torch.autograd.grad(h.sum(), list(first.parameters()))


def seconds_of(work: Callable[[nn.Module, Tensor], None], model: nn.Module, tokens: Tensor) -> float:
    """Return the shortest time of three calls, after a first one."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        work(model, tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main(length: int = 2048, device: str | None = None) -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loops = small_model().to(device)
    recurrences = without_loops(loops)

    tokens = torch.randint(2, 256, (2, min(length, 256)), device=device)
    logits, gradients = logits_and_gradients(loops.double(), tokens)
    our_logits, our_gradients = logits_and_gradients(recurrences.double(), tokens)
    errors = [(g - w).abs().max() / w.abs().max() for g, w in zip(our_gradients, gradients, strict=True)]
    print("by a loop, which accumulates in float32 whatever the model's dtype, and by a recurrence:")
    print(f"logits differ in float64 by    {(our_logits - logits).abs().max() / logits.abs().max():.1e}")
    print(f"gradients differ in float64 by {max(errors):.1e}")

    loops, recurrences = loops.float(), recurrences.float()
    written = [model.generate(tokens[:1, :20], max_new_tokens=20, do_sample=False) for model in (loops, recurrences)]
    print(f"both write the same: {torch.equal(*written)}")

    tokens = torch.randint(2, 256, (2, length), device=device)
    results = {}
    for name, work in (("the model", training_step), ("one RG-LRU", rg_lru_alone)):
        loop, recurrence = results[name] = seconds_of(work, loops, tokens), seconds_of(work, recurrences, tokens)
        print(
            f"{name}, forward and backward over {length} steps: {loop:.3f} s with its loop, {recurrence:.4f} s without"
        )
    return results


if __name__ == "__main__":
    main()
