"""Real text that every machine has: the Python standard library's own sources.

The choice of files is a function of the interpreter alone (sorted by name), so two processes on one machine see the
same bytes; another Python version has other sources, and the digest, which is the dataset's identity, says so.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from onward.errors import ConfigurationError

CORPUS_BYTES = 2_000_000
"""Where the choice of files stops: enough text that the demonstration never sees a window twice."""


@dataclass(frozen=True)
class Corpus:
    """Text as token numbers, and what identifies it.

    Attributes:
        tokens: One vocabulary index per byte of text.
        vocabulary: The byte values that occur, sorted; a token is a position in it.
        files: Names of the source files, in the order they were joined.
        sha256: Digest of the joined text.
    """

    tokens: NDArray[np.uint8]
    vocabulary: tuple[int, ...]
    files: tuple[str, ...]
    sha256: str

    def vocabulary_asset(self) -> bytes:
        """The vocabulary as the file that is stored in every checkpoint."""
        return json.dumps({"kind": "bytes", "tokens": list(self.vocabulary)}).encode()

    def tokenizer_identity(self) -> dict[str, object]:
        """What must not change between two incarnations: the mapping from bytes to tokens."""
        digest = hashlib.sha256(self.vocabulary_asset()).hexdigest()
        return {"kind": "bytes", "size": len(self.vocabulary), "sha256": digest}

    def dataset_identity(self) -> dict[str, object]:
        """What the text is: name, size and digest."""
        return {"name": "python-standard-library", "bytes": len(self.tokens), "sha256": self.sha256}


def load_corpus(folder: Path | None = None, limit: int = CORPUS_BYTES) -> Corpus:
    """Reads the corpus.

    Args:
        folder: Where the ``.py`` files lie; by default the standard library of the running interpreter.
        limit: No further file is taken once so many bytes are there.

    Raises:
        ConfigurationError: The folder holds no sources (an interpreter that keeps its library in an archive).
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    names: list[str] = []
    text = bytearray()
    # Names with an underscore in front are left out: among them are files generated for one machine.
    for path in sorted(folder.glob("[!_]*.py")):
        if len(text) >= limit:
            break
        names.append(path.name)
        text += path.read_bytes()
    if not text:
        raise ConfigurationError(f"no Python sources in {folder}", next_step="use an interpreter with its library")
    vocabulary = tuple(sorted(set(text)))
    table = np.zeros(256, dtype=np.uint8)
    table[list(vocabulary)] = np.arange(len(vocabulary), dtype=np.uint8)
    tokens = table[np.frombuffer(bytes(text), dtype=np.uint8)]
    return Corpus(tokens, vocabulary, tuple(names), hashlib.sha256(text).hexdigest())


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Neighbouring windows of ``length`` tokens, each with the token that follows; an item carries its own number."""

    def __init__(self, tokens: NDArray[np.uint8], length: int) -> None:
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].astype(np.int64)
        return {"id": torch.tensor(index), "tokens": torch.from_numpy(window)}
