"""The corpus is real text, the same in every process of one interpreter, and its windows cover it once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from onward.demo.corpus import CORPUS_BYTES, Windows, load_corpus
from onward.errors import ConfigurationError


def test_the_standard_library_is_enough_text() -> None:
    corpus = load_corpus()
    assert len(corpus.tokens) >= CORPUS_BYTES
    assert list(corpus.files) == sorted(corpus.files)
    again = load_corpus()
    assert again.sha256 == corpus.sha256
    assert again.tokens.tobytes() == corpus.tokens.tobytes()


def test_tokens_give_the_text_back(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"zeta = 1\n")
    (tmp_path / "a.py").write_bytes("alpha = 'é'\n".encode())
    (tmp_path / "_generated.py").write_bytes(b"machine = 'x'\n")
    corpus = load_corpus(tmp_path)
    assert corpus.files == ("a.py", "b.py")
    text = bytes(corpus.vocabulary[token] for token in corpus.tokens)
    assert text == "alpha = 'é'\nzeta = 1\n".encode()
    assert json.loads(corpus.vocabulary_asset())["tokens"] == sorted(set(text))


def test_the_choice_stops_at_the_limit(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.py").write_bytes(b"x" * 10)
    assert load_corpus(tmp_path, limit=15).files == ("a.py", "b.py")


def test_other_text_is_another_dataset(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"one\n")
    before = load_corpus(tmp_path)
    path.write_bytes(b"eno\n")
    after = load_corpus(tmp_path)
    assert before.dataset_identity() != after.dataset_identity()
    assert before.tokenizer_identity() == after.tokenizer_identity()


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no Python sources"):
        load_corpus(tmp_path)


def test_windows_carry_their_number_and_cover_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(bytes(range(65, 91)))
    corpus = load_corpus(tmp_path)
    windows = pickle.loads(pickle.dumps(Windows(corpus.tokens, 5)))
    assert len(windows) == 5
    items = [windows[index] for index in range(len(windows))]
    assert [int(item["id"]) for item in items] == [0, 1, 2, 3, 4]
    assert torch.cat([item["tokens"][:-1] for item in items]).tolist() == list(range(25))
    assert all(len(item["tokens"]) == 6 for item in items)
    with pytest.raises(IndexError):
        windows[5]
