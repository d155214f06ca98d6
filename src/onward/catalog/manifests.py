"""The manifest of a checkpoint alone, for those who only want to know what it is."""

from __future__ import annotations

from onward.catalog.reader import DamagedFile, Place
from onward.format.codec import LIMITS, decode_manifest
from onward.format.names import MANIFEST, RunPlaces
from onward.records import CheckpointInfo, Manifest
from onward.storage.base import Store


def manifest_of(store: Store, places: RunPlaces, info: CheckpointInfo) -> Manifest:
    """The manifest that the ledger vouches for; of a checkpoint that is being deleted, the one that is kept aside.

    Raises:
        DamagedFile: It is missing, altered, or not of the format.
        StorageError: The store itself refuses.
    """
    if info.status in ("deleting", "deleted"):
        try:
            return _manifest(_place(store, places.deleted, info), f"{info.folder}.json", info.manifest_sha256)
        except DamagedFile:
            if info.status == "deleted":
                raise
    return _manifest(_place(store, places.checkpoint(info.folder), info), MANIFEST, info.manifest_sha256)


def manifest_in(place: Place) -> Manifest:
    """The manifest of a folder that no ledger vouches for.

    Raises:
        DamagedFile: It is missing, or not of the format.
        StorageError: The store itself refuses.
    """
    return _manifest(place, MANIFEST, None)


def _place(store: Store, root: str, info: CheckpointInfo) -> Place:
    return Place(store=store, root=root, tier=info.tier, name=info.folder)


def _manifest(place: Place, path: str, digest: str | None) -> Manifest:
    return place.decoded(decode_manifest, place.read(path, digest, LIMITS[MANIFEST]), path)
