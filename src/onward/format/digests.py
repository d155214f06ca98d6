"""The two digests: SHA-256 of a file (stock tools, tamper evidence), XXH3-128 of a chunk (every load)."""

from __future__ import annotations

import hashlib

import xxhash

Bytes = bytes | bytearray | memoryview


def sha256(data: Bytes) -> str:
    """SHA-256 as lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def xxh3(data: Bytes) -> str:
    """XXH3-128 as lower-case hex, big-endian as xxhash prints it."""
    return xxhash.xxh3_128_hexdigest(data)


EMPTY_SHA256 = sha256(b"")
