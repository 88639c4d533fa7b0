"""``ostinato generate``: text from a trained model."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ostinato.cli.devices import Device, choose_device


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="best.safetensors or last.safetensors of a training.")],
    prompt: Annotated[str | None, Option(help="The text to continue.", show_default="a new line")] = None,
    length: Annotated[int, Option(help="Characters to write.")] = 500,
    temperature: Annotated[
        float, Option(help="Below 1 more predictable, above 1 more surprising; 0 is always the likeliest character.")
    ] = 0.8,
    top_k: Annotated[int | None, Option(help="Draw among the k likeliest characters only.", show_default="all")] = None,
    seed: Annotated[int | None, Option(help="The same seed gives the same text.", show_default="random")] = None,
    device: Device = "auto",
) -> None:
    """Continue a prompt with a trained model, character by character."""
    import torch

    from ostinato.checkpoint import load_checkpoint

    if length < 1:
        raise ValueError(f"length must be at least 1; got {length}")
    chosen = choose_device(device)
    loaded = load_checkpoint(checkpoint)
    if prompt is None:
        prompt = "\n" if "\n" in loaded.vocabulary.characters else loaded.vocabulary.characters[0]
    if not prompt:
        raise ValueError("prompt must have at least one character; got none")
    tokens = loaded.vocabulary.encode(prompt).to(chosen)
    if seed is not None and not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be at least 0 and below 2**63; got {seed}")
    generator = torch.Generator(chosen)
    generator.seed() if seed is None else generator.manual_seed(seed)
    written = loaded.model.to(chosen).generate(
        tokens[None], length, temperature=temperature, top_k=top_k, generator=generator
    )
    print(prompt, end="")
    for token in written:
        print(loaded.vocabulary.decode(token.tolist()), end="", flush=True)
    print()
