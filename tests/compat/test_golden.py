"""What an earlier version wrote can still be read, byte for byte. One folder for each released format."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_state
import numpy as np
import pytest
import torch

import onward
from onward.catalog.attempts import read_outcomes
from onward.catalog.ledger import read_ledger
from onward.catalog.listing import list_runs, read_catalog
from onward.catalog.reader import Place, open_folder
from onward.format import codec
from onward.format.names import RunPlaces
from onward.records import Intent, Receipt, RunRecord, StateFile, StoreRecord
from onward.restore.load import CheckpointSource
from onward.state import tensors as exact
from onward.storage.posix import PosixStore
from onward.storage.wrappers import ReadOnlyStore
from onward.upkeep.verify import verify
from support import RUN, content, key

GOLDEN = Path(__file__).resolve().parent / "format-1"
EXPECTED = json.loads((GOLDEN / "expected.json").read_bytes())
CHECKPOINTS = sorted((GOLDEN / "store").glob("runs/*/checkpoints/step-*"))
WHOLE = [path for path in CHECKPOINTS if ".writing-" not in path.name]


@pytest.fixture
def copy(fast_path: Path) -> str:
    """The golden store in a place that may be written to: its URL."""
    shutil.copytree(GOLDEN / "store", fast_path / "store")
    return f"file://{fast_path}/store"


def places(run: str) -> tuple[ReadOnlyStore, RunPlaces]:
    return ReadOnlyStore(PosixStore(GOLDEN / "store")), RunPlaces(run)


def place(run: str, folder: str) -> Place:
    store, at = places(run)
    return Place(store=store, root=at.checkpoint(folder), tier="home", name=folder)


def test_the_golden_files_are_as_they_were_made() -> None:
    """The control: whoever changes a file here changes what the test proves."""
    files = {p for p in (GOLDEN / "store").rglob("*") if p.is_file()}
    found = {str(p.relative_to(GOLDEN / "store")): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    assert found == EXPECTED["files"]


def _decoder(path: str) -> Callable[[bytes], bytes] | None:
    """Path → bytes to bytes, through the record and back."""
    name, parts = path.rpartition("/")[2], path.split("/")

    def through(decode: Callable[[bytes, str], Any], encode: Callable[[Any], bytes] = codec.encode) -> Any:
        return lambda data: encode(decode(data, path))

    kinds: dict[str, Any] = {
        "onward.json": through(lambda d, p: codec.decode_sealed(d, StoreRecord, p)),
        "run.json": through(lambda d, p: codec.decode_sealed(d, RunRecord, p)),
        "manifest.json": through(codec.decode_manifest),
        "layout.json": through(codec.decode_layout),
        "record.json": through(codec.decode_record),
        "state.json": through(lambda d, p: codec.decode(d, StateFile, p)),
        "intent.json": through(lambda d, p: codec.decode(d, Intent, p)),
        "manifest.sha256": through(codec.decode_sums, codec.encode_sums),
    }
    if name in kinds:
        return kinds[name]
    folder = parts[2] if len(parts) > 3 else ""
    if folder == "ledger":
        return through(codec.decode_entry)
    if folder == "receipts":
        return through(lambda d, p: codec.decode_sealed(d, Receipt, p))
    if folder == "deleted":
        return through(codec.decode_manifest)
    return None


def test_every_record_is_read_and_would_be_written_the_same_today() -> None:
    seen = 0
    for path in EXPECTED["files"]:
        decoder = _decoder(path)
        if decoder is not None:
            data = (GOLDEN / "store" / path).read_bytes()
            assert decoder(data) == data, path
            seen += 1
    print(f"{seen} records of format 1 read and written again, the same")
    assert seen > 40


def test_what_exists_is_listed_as_it_was_left() -> None:
    store, at = places(RUN)
    assert list_runs(store) == [RUN, "three", "trained"]
    catalog = read_catalog(store, at, "home")
    assert catalog.findings == ()
    assert [(c.step, c.status, c.verified) for c in catalog.checkpoints] == [
        (10, "deleted", "full"),
        (20, "committed", "full"),
        (30, "committed", "full"),
        (30, "committed", "full"),
    ]
    kinds = [type(entry).__name__ for _, entry in sorted(read_ledger(store, at).entries.items())]
    assert kinds == [
        *("OpenEntry", "CheckpointEntry", "CheckpointEntry", "CheckpointEntry"),
        *("OpenEntry", "DeleteEntry", "VoidEntry", "CheckpointEntry"),
    ]
    assert [item.kind for item in catalog.foreign] == ["attempt"]
    assert read_outcomes(store, at) == []


@pytest.mark.parametrize("folder", WHOLE, ids=lambda path: path.name)
@pytest.mark.parametrize("method", ["quick", "full"])
def test_every_checkpoint_verifies(folder: Path, method: Any) -> None:
    run = folder.parents[1].name
    report = verify(place(run, folder.name), None, run=run, method=method)
    assert report.ok
    assert report.findings == ()


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils are not installed")
@pytest.mark.parametrize("folder", WHOLE, ids=lambda path: path.name)
def test_every_checkpoint_passes_sha256sum(folder: Path) -> None:
    check = ["sha256sum", "--check", "--strict", "--quiet", "manifest.sha256"]
    assert subprocess.run(check, cwd=folder, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(("which", "step"), [("newest", 30), ("20", 20), ("seq:4", 30)])
def test_every_tensor_and_every_value_comes_back(copy: str, which: str, step: int) -> None:
    """Every dtype, every kind of value, the tie, the assets; what was saved is a pure function of the step."""
    held = golden_state.Held({})
    config = onward.Config(store=copy, run=RUN, save=onward.SaveSettings(writer="thread"))
    with onward.Checkpointer(config, everything=held) as saver:
        start = saver.resume(checkpoint=which)
    assert start.next_step == step
    loaded = held.state["tensors"]
    names = [name for name in golden_state.tensors() if name in loaded]
    assert len(names) >= 30
    for name in names:
        dtype, shape = golden_state.tensors()[name]
        assert (exact.dtype_name(loaded[name].dtype), tuple(loaded[name].shape)) == (dtype, shape)
        assert bytes(exact.as_bytes(loaded[name])) == golden_state.raw(name, step), name
    assert held.state["tied"] is loaded["float32"]
    assert repr(held.state["values"]) == repr(golden_state.values(step))
    assert start.checkpoint is not None
    folder = place(RUN, start.checkpoint.folder)
    assert {a.path: folder.read(a.path, a.sha256, 1000) for a in open_folder(folder).manifest.assets} == {
        **{f"assets/{name}": data for name, data in golden_state.ASSETS.items()},
        "assets/model_config.json": folder.read("assets/model_config.json", None, 1000),
    }


def test_three_ranks_come_back_together() -> None:
    folder = next(path.name for path in WHOLE if path.parents[1].name == "three")
    opened = open_folder(place("three", folder))
    assert (opened.manifest.world_size, len(opened.records)) == (3, 3)
    loaded = CheckpointSource(opened).fetch_all()
    assert {k: bytes(exact.as_bytes(tensor)) for k, tensor in loaded.items()} == {
        key(name): data for name, data in content(70).items()
    }


def test_a_real_run_goes_on_bit_identically(copy: str) -> None:
    """Model, AdamW, schedule and random state of an earlier version; dropout and data draw from it."""
    saver, model, optimizer, scheduler = golden_state.training(copy)
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    with saver:
        assert saver.resume().next_step == 4
        losses = golden_state.train(model, optimizer, scheduler, 3)
    if EXPECTED["torch"].split("+")[0] == torch.__version__.split("+")[0]:
        assert losses == EXPECTED["trained"]["losses"]
    else:
        wanted = [float.fromhex(loss) for loss in EXPECTED["trained"]["losses"]]
        assert [float.fromhex(loss) for loss in losses] == pytest.approx(wanted)
