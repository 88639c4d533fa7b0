"""A character model of your own: trains a small minGRU on Python source in 500 steps, then writes some.

The text is the source of Python's standard library; give a UTF-8 file as the argument to train on another text.
``ostinato train`` and ``ostinato generate`` do the same at full size, with checkpoints.
"""

import sys
from pathlib import Path

import torch

from ostinato.models import LanguageModel
from ostinato.text import Vocabulary, read_corpus, standard_library
from ostinato.training import Trainer, TrainingSettings


def main(steps: int = 500) -> None:
    torch.manual_seed(0)
    corpus = read_corpus(Path(sys.argv[1])) if len(sys.argv) > 1 else standard_library()
    vocabulary = Vocabulary.of(corpus.text)
    model = LanguageModel(len(vocabulary), width=96, num_layers=2, dropout=0.0)
    settings = TrainingSettings(steps=steps, batch_size=8, chunk_length=128, warmup_steps=20, held_out_limit=1 << 13)
    trainer = Trainer(model, vocabulary.encode(corpus.text), settings)
    print(f"{corpus.source}, {len(corpus.text):,} characters, {len(vocabulary)} different")

    while trainer.progress < 1:
        trainer.advance(50)
        point = trainer.evaluate()
        print(f"step {point.step:4}: held-out loss {point.held_out_loss:.3f} nats per character")
    print()

    prompt = "def "
    tokens = model.generate(vocabulary.encode(prompt)[None], 300, temperature=0.6, top_k=20)
    print(prompt, end="")
    for token in tokens:  # one step of every layer each, in constant memory
        print(vocabulary.decode(token.tolist()), end="", flush=True)
    print()


if __name__ == "__main__":
    main()
