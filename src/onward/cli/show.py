"""``onward show``: one checkpoint, as its manifest describes it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from math import prod
from typing import Annotated

import typer

from onward.catalog.manifests import manifest_in, manifest_of
from onward.catalog.reader import OpenCheckpoint, Place, open_checkpoint, open_folder
from onward.cli.options import ConfigOption, Home, JsonOption, RunOption, StoreOption, choose, closing, find_home
from onward.cli.screen import Answer, Shown, now
from onward.format.dtypes import itemsize
from onward.format.names import RunPlaces
from onward.records import CheckpointInfo, Layout, Manifest
from onward.report.checkpoints import (
    asset_table,
    component_table,
    description_table,
    manifest_facts,
    rank_table,
    receipt_table,
    tensor_table,
)
from onward.report.tables import ago, counted, plain, size

EPILOG = closing("onward show 10000 --tensors", {3: "its manifest is damaged", 4: "there is no such checkpoint"}, 78)


def command(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="newest, a step, seq:N, or a folder's name.")
    ] = "newest",
    tensors: Annotated[bool, typer.Option("--tensors", help="Also every tensor: dtype, shape, bytes.")] = False,
    config: ConfigOption = None,
    store: StoreOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Show a checkpoint's manifest and receipts.

    Only the manifest is read and checked (with --tensors also layout and records); "onward verify" checks the rest.
    A folder that could be adopted is shown too.
    """
    home = find_home(config, store, run)
    subject = _find(home, home.place(), checkpoint)
    manifest, info = subject.manifest(), subject.info
    layout = subject.open().layout if tensors else None
    sizes = {t.key: prod(t.shape) * itemsize(t.dtype) for t in layout.tensors} if layout else {}
    document: dict[str, object] = {
        "store": home.store.url,
        "tier": home.tier,
        "checkpoint": info,
        "status": info.status if info else "adoptable",
        "folder": subject.place.name,
        "manifest": manifest,
    }
    if layout:
        document["tensors"] = [
            {"name": t.key, "dtype": t.dtype, "shape": t.shape, "bytes": sizes[t.key], "tie": t.tie}
            for t in layout.tensors
        ]
    time = now()
    shown: list[Shown] = [plain(f"{home.store.url}/{subject.place.root}"), ""]
    shown.append(manifest_facts(manifest, _state(info, time), time))
    tables = [component_table(manifest), description_table(manifest)]
    if manifest.world_size > 1:
        tables.append(rank_table(manifest))
    tables.append(asset_table(manifest))
    if info:
        tables.append(receipt_table(info.receipts, time))
    if layout:
        tables.append(tensor_table(layout, sizes))
    for table in tables:
        if table.rows:
            shown += ["", table]
    if layout:
        shown += ["", _tensor_sum(layout, sizes)]
    return Answer(document, shown)


@dataclass(frozen=True)
class _Subject:
    """A checkpoint of the ledger, or a folder that could be adopted (``info`` is None)."""

    place: Place
    places: RunPlaces
    info: CheckpointInfo | None

    def manifest(self) -> Manifest:
        return manifest_of(self.place.store, self.places, self.info) if self.info else manifest_in(self.place)

    def open(self) -> OpenCheckpoint:
        if self.info is None:
            return open_folder(self.place)
        return open_checkpoint(self.place.store, self.places, self.info)


def _find(home: Home, places: RunPlaces, which: str) -> _Subject:
    catalog = home.catalog(places)
    adoptable = any(item.kind == "adoptable" and item.name == which for item in catalog.foreign)
    info = None if adoptable else choose(catalog, which, "show")
    name = info.folder if info else which
    place = Place(store=home.reader(), root=places.checkpoint(name), tier=home.tier, name=name)
    return _Subject(place=place, places=places, info=info)


def _state(info: CheckpointInfo | None, time: datetime) -> dict[str, str]:
    if info is None:
        return {"status": "adoptable: the ledger does not know it; see onward adopt"}
    return {
        "status": f"{info.status}: {info.reason}" if info.reason else info.status,
        "verified": info.verified,
        "committed": ago(info.committed, time),
    }


def _tensor_sum(layout: Layout, sizes: dict[str, int]) -> str:
    stored = [tensor for tensor in layout.tensors if tensor.tie is None]
    total = sum(sizes[tensor.key] for tensor in stored)
    return f"{counted(len(layout.tensors), 'tensor')}, {len(stored):,} stored with {size(total)}"
