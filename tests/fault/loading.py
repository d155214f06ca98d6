"""Loading through the product: every chunk checked, as a resume does it."""

from __future__ import annotations

from onward.catalog.reader import open_checkpoint
from onward.records import CheckpointInfo
from onward.restore.load import CheckpointSource
from onward.state.tensors import as_bytes
from onward.storage.base import Store

from .harness import PLACES
from .state import contents_of


def check_loads(store: Store, info: CheckpointInfo) -> None:
    """Fetching all tensors gives exactly the bytes of the checkpoint's step."""
    fetched = CheckpointSource(open_checkpoint(store, PLACES, info), threads=1).fetch_all()
    due = contents_of(info.step)
    assert {key: bytes(as_bytes(tensor)) for key, tensor in fetched.items()} == {key: due[key] for key in fetched}
    assert set(due) == {*fetched, "state", "asset"}
