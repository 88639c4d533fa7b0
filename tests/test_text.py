"""Reading text, and the tokens and windows made of it."""

import pytest
import torch

from ostinato.text import Vocabulary, random_windows, read_corpus, standard_library, streams


def test_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.md").write_bytes("zweite\r\nZeile ü".encode())
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    corpus = read_corpus(tmp_path)
    assert corpus.text == "one\nzweite\nZeile ü"
    assert (corpus.files, corpus.skipped) == (2, 1)
    assert read_corpus(str(tmp_path / "b" / "c.md")).text == "zweite\nZeile ü"


def test_unreadable_text(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        read_corpus(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: expected UTF-8 text; byte 2 is 0xef"):
        read_corpus(tmp_path / "latin.txt")
    with pytest.raises(ValueError, match="found none with text, 1 of another kind"):
        read_corpus(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt: expected text; the file is empty"):
        read_corpus(tmp_path / "empty.txt")


def test_standard_library_is_bounded_source():
    corpus = standard_library(max_bytes=300_000)
    assert 200_000 < len(corpus.text.encode()) <= 300_000 + corpus.files
    assert "\nimport " in corpus.text


def test_vocabulary_round_trip():
    text = "naïve\n日本 🎵 zebra"
    vocabulary = Vocabulary.of(text)
    tokens = vocabulary.encode(text)
    assert tokens.dtype == torch.int32
    assert vocabulary.decode(tokens.tolist()) == text
    for token in (-1, len(vocabulary)):
        with pytest.raises(ValueError, match=f"tokens must be from 0 to .*; got {token}"):
            vocabulary.decode([token])
    assert len(vocabulary) == len(set(text))
    assert tokens.max() == len(vocabulary) - 1
    assert vocabulary.encode("").shape == (0,)


@pytest.mark.parametrize("character", ["b", "\x00", "🎵", "\udcff"])
def test_unknown_character(character):
    with pytest.raises(ValueError, match=r"at position 2 is not one of the 2 the model knows"):
        Vocabulary("ac").encode("ac" + character)


@pytest.mark.parametrize("call", [Vocabulary.of, Vocabulary("ab").encode])
def test_what_is_no_text(call):
    for text in (b"ab", ["a", "b"], None):
        with pytest.raises(TypeError, match=f"text must be a str; got {type(text).__name__}"):
            call(text)


@pytest.mark.parametrize("characters", ["", "ba", "aab"])
def test_characters_that_are_no_vocabulary(characters):
    with pytest.raises(ValueError, match=f"characters must be at least one, each once, sorted .*; got '{characters}'"):
        Vocabulary(characters)
    with pytest.raises(TypeError, match="characters must be a str; got list"):
        Vocabulary(list(characters))


def test_windows_are_pieces_of_the_text_with_targets_one_later():
    tokens = torch.arange(50, dtype=torch.int32)
    inputs, targets = random_windows(tokens, 4000, 7, torch.Generator().manual_seed(0))
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))
    assert set(inputs[:, 0].tolist()) == set(range(50 - 7))


def test_streams_keep_the_order():
    inputs, targets = streams(torch.arange(24), rows=4)
    assert torch.equal(inputs, torch.arange(20).view(4, 5))
    assert torch.equal(targets, inputs + 1)
