"""The ledger protocol keeps its promises in every order of events; and each of its rules is there for a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .cases import (
    BREAKS,
    DISCIPLINE_ONLY,
    LARGE,
    MEDIUM,
    NOTHING,
    SMALL,
    WORLDS,
    Break,
    Nothing,
    age_is_told_by_sequence,
    applies,
    search,
)
from .checker import explore
from .rules import RULE_NAMES, Config, Rules

AGE = {"age_is_told_by_sequence": age_is_told_by_sequence}


def _runs(table: dict[str, tuple[Config, ...]]) -> list[tuple[str, Config]]:
    return [(world, config) for world, configs in table.items() for config in configs]


def _named(value: object) -> str | None:
    if not isinstance(value, Config):
        return None
    return "-".join(
        f"{name}={each}" for name, each in vars(value).items() if name != "rules" and each not in (0, False)
    )


def _holds(world: str, config: Config) -> None:
    result = search(world, config, extra=AGE)
    print(f"\n{world} {_named(config)}: {result.states} states, depth {result.depth}, exhausted {result.exhausted}")
    assert result.violation is None, result.story()
    assert result.exhausted


@pytest.mark.parametrize(("world", "config"), [*_runs(SMALL), *_runs(MEDIUM)], ids=_named)
def test_the_protocol_holds(world: str, config: Config) -> None:
    _holds(world, config)


@pytest.mark.full
@pytest.mark.parametrize(("world", "config"), _runs(LARGE), ids=_named)
def test_the_protocol_holds_with_more_of_everything(world: str, config: Config) -> None:
    _holds(world, config)


@pytest.mark.parametrize("case", BREAKS, ids=str)
def test_a_rule_removed_breaks_an_invariant(case: Break) -> None:
    result = case.search()
    print(f"\nwithout {case.rule}: {result.story()}")
    assert result.violation == case.broken, result.story()


def _without(rule: str, world: str, room: dict[str, tuple[Config, ...]], watch: str) -> None:
    for config in room[world]:
        result = search(world, replace(config, rules=Rules().without(rule)), watch)
        assert result.exhausted, f"{rule} does prevent something: {result.story()}"


@pytest.mark.parametrize("case", NOTHING, ids=str)
def test_a_rule_that_another_covers(case: Nothing) -> None:
    _without(case.rule, case.world, SMALL, "all")
    if case.cover:
        alone, both = case.search(*case.cover), case.search(case.rule, *case.cover)
        print(f"\nwithout {case.rule} and {', '.join(case.cover)}: {both.story()}")
        assert alone.exhausted, f"{case.broken} needs no removal of {case.rule}: {alone.story()}"
        assert both.violation == case.broken


@pytest.mark.parametrize(("world", "rule"), DISCIPLINE_ONLY)
def test_a_rule_that_only_keeps_discipline(world: str, rule: str) -> None:
    _without(rule, world, SMALL, "harm")


@pytest.mark.full
@pytest.mark.parametrize("case", NOTHING, ids=str)
def test_a_rule_that_another_covers_with_more_of_everything(case: Nothing) -> None:
    _without(case.rule, case.world, MEDIUM, "all")


@pytest.mark.full
@pytest.mark.parametrize(("world", "rule"), DISCIPLINE_ONLY)
def test_a_rule_that_only_keeps_discipline_with_more_of_everything(world: str, rule: str) -> None:
    _without(rule, world, MEDIUM, "harm")


def test_age_is_told_by_sequence_only_if_the_fence_is_durable() -> None:
    rules = Rules().without("fsync_fence", "fsync_ledger_before_resuming")
    result = search("posix", Config(rules=rules, cuts=1), "acknowledged_lost", extra=AGE)
    print(f"\n{result.story()}")
    assert result.violation == "age_is_told_by_sequence"


def test_every_rule_is_accounted_for() -> None:
    shown = {(case.world, case.rule) for case in BREAKS} | {(case.world, case.rule) for case in NOTHING}
    assert shown == {(world, rule) for world in WORLDS for rule in RULE_NAMES if applies(world, rule)}


def test_the_search_finds_the_shortest_way_and_knows_when_it_saw_everything() -> None:
    def hops(n: int) -> list[tuple[str, int]]:
        return [(f"+{by}", n + by) for by in (1, 3) if n + by <= 10]

    assert explore(0, hops, {"never 7": lambda n: n != 7}, 100).trace in {
        ("+1", "+3", "+3"),
        ("+3", "+1", "+3"),
        ("+3", "+3", "+1"),
    }
    everything = explore(0, hops, {}, 100)
    assert (everything.states, everything.exhausted, everything.violation) == (11, True, None)
    assert not explore(0, hops, {}, 5).exhausted
