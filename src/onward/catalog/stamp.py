"""Who and when, as they stand in records. Times are for people; no decision rests on them."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from contextlib import suppress
from datetime import UTC, datetime


def now() -> str:
    """The time in UTC with microseconds, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def compact_now() -> str:
    """The same time in a form that file names can carry."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


def actor() -> str:
    """User, host and process, for logs."""
    user = str(os.getuid())
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    return f"{user}@{host()}:{os.getpid()}"


def token() -> str:
    """A name that nobody else will choose: 128 random bits as hex."""
    return secrets.token_hex(16)
