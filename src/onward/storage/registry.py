"""URL → store."""

from __future__ import annotations

import os
from typing import Literal
from urllib.parse import unquote_to_bytes, urlsplit

from onward.errors import ConfigurationError
from onward.storage.base import Store
from onward.storage.memory import MemoryStore
from onward.storage.posix import Mode, PosixStore

_memory: dict[str, MemoryStore] = {}


def open_store(url: str, *, mode: Mode = "private", publish: Literal["link", "rename"] = "link") -> Store:
    """Returns the store at ``url``: ``file:///path``, a plain path, or ``memory://name`` (this process only).

    Raises:
        ConfigurationError: The scheme is not one that this version speaks.
    """
    if not url:
        raise ConfigurationError("the store's URL is empty", next_step="name a store: file:///path/of/the/store")
    if "://" not in url:
        return PosixStore(url, mode=mode, publish=publish)
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ConfigurationError(f"{url!r} names the host {parts.netloc!r}", next_step="write file:///path")
        if parts.query or parts.fragment or not parts.path.startswith("/"):
            raise ConfigurationError(
                f"{url!r} is not file:///path", next_step="write ? as %3F and # as %23, or give a plain path"
            )
        return PosixStore(os.fsdecode(unquote_to_bytes(parts.path)), mode=mode, publish=publish)
    if parts.scheme == "memory":
        return _memory.setdefault(parts.netloc, MemoryStore(parts.netloc))
    raise ConfigurationError(
        f"no store is known for {parts.scheme!r} in {url!r}", next_step="use file:///path/of/the/store"
    )
