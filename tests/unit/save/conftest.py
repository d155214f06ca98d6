"""Fixtures of the tests of saving."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from writerside import OPENING, REAL, Fixture, Make

from onward.catalog.incarnation import Incarnation
from onward.save import remote


@pytest.fixture
def make(run_on_disk: Incarnation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Fixture] = []

    def make(program: str | None = None, **settings: Any) -> Fixture:
        """A started writer; of its processes the first one runs ``program``, those after it are real."""
        fixture = Fixture(run_on_disk, **settings)
        made.append(fixture)
        monkeypatch.setattr(remote, "_START", REAL if program is None else OPENING + program)
        fixture.writer.start()
        monkeypatch.setattr(remote, "_START", REAL)
        return fixture

    yield make
    for fixture in made:
        fixture.writer.close()
        os.close(fixture.fd)
