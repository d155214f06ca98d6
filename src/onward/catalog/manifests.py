"""The manifest of a checkpoint alone, for those who only want to know what it is."""

from __future__ import annotations

from onward.catalog.reader import Place
from onward.format.codec import LIMITS, decode_manifest
from onward.format.names import MANIFEST, RunPlaces
from onward.records import CheckpointInfo, Manifest
from onward.storage.base import Store


def manifest_of(store: Store, places: RunPlaces, info: CheckpointInfo) -> Manifest:
    """The manifest that the ledger vouches for; of a deleted checkpoint, the one that was kept aside.

    Raises:
        DamagedFile: It is missing, altered, or not of the format.
        StorageError: The store itself refuses.
    """
    root, path = places.checkpoint(info.folder), MANIFEST
    if info.status == "deleted":
        root, path = places.deleted, f"{info.folder}.json"
    place = Place(store=store, root=root, tier=info.tier, name=info.folder)
    return place.decoded(decode_manifest, place.read(path, info.manifest_sha256, LIMITS[MANIFEST]), path)


def manifest_in(place: Place) -> Manifest:
    """The manifest of a folder that no ledger vouches for.

    Raises:
        DamagedFile: It is missing, or not of the format.
        StorageError: The store itself refuses.
    """
    return place.decoded(decode_manifest, place.read(MANIFEST, None, LIMITS[MANIFEST]), MANIFEST)
