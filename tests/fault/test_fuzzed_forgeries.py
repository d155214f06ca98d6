"""Random changes of a checkpoint's records, every digest put right again: refused, or harmless, never anything else."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest

from onward.catalog.listing import read_catalog
from onward.errors import OnwardError
from onward.storage.memory import MemoryStore
from onward.upkeep.verify import verify
from recorder import resumed
from support import PLACES, RUN, TIER, content, place_of

from .forging import Plain, forge
from .judging import FOLDER, NUMBER, bounded, good

SAMPLE, ALL = 400, 20_000
STAGES = ("index", "state", "record", "layout", "manifest", "sums", "entry")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**62, -(2**63), 0.5, -0.0, 1e300),
    *("", "x", "..", "/", "a/b", "rank-00000/state.json", "$tensor", "F32", "float64", "\u00e9", "0" * 32, "0" * 64),
    *([], {}, [0], [[]], [1, 2], {"$tensor": 1}, {"$tuple": []}, {"$bytes": "!"}, {"a": {}}),
)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container and key in a tree: where a change can be made."""
    found: list[tuple[Any, Any]] = []
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items:
        found.append((tree, key))
        found.extend(places(value))
    return found


def change(tree: Plain, source: random.Random) -> None:
    """One small change somewhere: another value, a value gone, doubled, or swapped with another."""
    holder, key = source.choice(places(tree))
    kind = source.randrange(7)
    value = holder[key]
    if kind <= 2:
        holder[key] = copy.deepcopy(source.choice(VALUES))
    elif kind == 3 and type(value) is int:
        holder[key] = value + source.choice([-4096, -1, 1, 8, 4096])
    elif kind == 3 and isinstance(value, str):
        holder[key] = source.choice([value[:-1], value + "0", value.upper(), value[::-1]])
    elif kind == 4:
        del holder[key]
    elif kind == 5:
        other, at = source.choice(places(tree))
        holder[key] = copy.deepcopy(other[at])
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(value))
    else:
        holder[source.choice(["x", key + "x"]) if isinstance(key, str) else "x"] = copy.deepcopy(value)


def judge(store: MemoryStore) -> str:
    """Verification and load of a changed store: the outcome, for the count."""
    try:
        info = next((c for c in read_catalog(store, PLACES, TIER).checkpoints if c.folder == FOLDER), None)
        report = verify(place_of(store, FOLDER), info, run=RUN, threads=1)
        begun, part = resumed(store)
    except OnwardError as error:
        assert error.message
        return f"refused: {error.code}"
    assert begun.next_step in (10, 20)
    # A forged state may refer to a tensor once more, under another name; what is loaded under each name is right.
    assert content(begun.next_step).items() <= part.bytes().items()
    if begun.next_step == 20:
        assert report.ok, "what verification refuses must not load"
        return "harmless"
    return "fell back" if not report.ok else "fell back at load"


def sweep(number: int, seed: int) -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for turn in range(number):
        source = random.Random(f"{seed}/{turn}")
        stage = STAGES[turn % len(STAGES)]
        changes = source.choice([1, 1, 1, 2, 3])

        def edit(tree: Plain, source: random.Random = source, changes: int = changes) -> None:
            for _ in range(changes):
                if places(tree):
                    change(tree, source)

        try:
            store = forge(good(), FOLDER, NUMBER, {stage: edit})
        except (KeyError, TypeError, AttributeError, IndexError, ValueError):
            continue  # the change left nothing that could be put right again
        try:
            outcomes[stage, judge(store)] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, turn {turn}, {stage}: {type(error).__name__}: {error}") from error
    for (stage, outcome), times in sorted(outcomes.items()):
        print(f"{stage:10} {outcome:32} {times:6}")
    print(f"{sum(outcomes.values())} forgeries: each refused, or without effect on a byte that was loaded")


def test_a_sample_of_random_forgeries() -> None:
    with bounded():
        sweep(SAMPLE, seed=1)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_thousand_random_forgeries() -> None:
    with bounded():
        sweep(ALL, seed=2)
