"""Fixtures of the cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import onward


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A fresh store."""
    onward.init_store(f"file://{tmp_path}/store")
    return f"file://{tmp_path}/store"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on several threads, and a busy machine has none to spare."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
