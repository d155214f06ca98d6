"""Which configuration differences stop a resume, which are only told, and how they are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import ConfigurationError
from onward.policy.compatibility import Difference, check_policies, compare, flatten, policy_of, table
from onward.records import Description

SAVED = Description(
    model_config={"n_heads": 8, "n_embd": 64, "rope": {"base": 10000}},
    tokenizer={"sha256": "aa"},
    dataset={"name": "corpus"},
    hyperparameters={"lr": 0.1},
    code={"commit": "c1"},
    environment={"torch": "2.9", "python": "3.11"},
)


def changed(**parts: object) -> Description:
    import msgspec

    return msgspec.structs.replace(SAVED, **parts)


def found(live: Description, **policies: str) -> dict[str, str]:
    return {d.field: d.policy for d in compare(SAVED, live, check_policies(policies))}


def test_equal_descriptions_have_no_differences() -> None:
    assert compare(SAVED, SAVED, {}) == []
    assert compare(Description(), Description(), {}) == []


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        (changed(model_config={"n_heads": 2, "n_embd": 64, "rope": {"base": 10000}}), {"model_config.n_heads": "must"}),
        (changed(model_config={"n_heads": 8, "n_embd": 64, "rope": {"base": 5}}), {"model_config.rope.base": "must"}),
        (changed(tokenizer={"sha256": "bb"}), {"tokenizer.sha256": "must"}),
        (changed(dataset={"name": "corpus", "split": "x"}), {"dataset.split": "must"}),
        (changed(hyperparameters={}), {"hyperparameters": "must", "hyperparameters.lr": "must"}),
        (changed(code={"commit": "c2"}), {"code.commit": "warn"}),
        (changed(environment={"torch": "2.10", "python": "3.12"}), {"environment.torch": "warn"}),
        (changed(code=None), {"code": "warn"}),
        (changed(environment=None), {}),
    ],
)
def test_each_part_has_its_own_default(live: Description, expected: dict[str, str]) -> None:
    """Heads are geometry that shapes cannot show; the machine's Python is nobody's concern."""
    assert found(live) == expected


def test_a_part_that_only_one_side_describes_is_shown_but_never_binding() -> None:
    assert found(changed(model_config=None)) == {"model_config": "warn"}
    assert [d.policy for d in compare(Description(), SAVED, {})] == ["warn"] * 5


def test_the_users_policy_wins_and_the_longest_pattern_among_the_users() -> None:
    live = changed(model_config={"n_heads": 2, "n_embd": 32, "rope": {"base": 10000}})
    assert found(live, **{"model_config.n_heads": "ignore"}) == {"model_config.n_embd": "must"}
    assert found(live, **{"model_config*": "warn", "model_config.n_embd": "ignore"}) == {"model_config.n_heads": "warn"}
    assert found(live, **{"*": "ignore"}) == {}
    assert policy_of("schedule.T_max", {}) == "must"
    assert policy_of("optimizer.lr", {}) == "warn"
    assert policy_of("something else", {}) == "must"


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="model_config") as caught:
        check_policies({"model_config": "maybe"})
    assert "must" in caught.value.next_step


def test_types_are_part_of_a_value() -> None:
    """True is not 1 and 8 is not 8.0: what was described is compared, not what Python calls equal."""
    for before, after in ((True, 1), (8, 8.0), ("8", 8), ([1, 2], (1, 2)), (None, "None")):
        saved, live = Description(code={"x": before}), Description(code={"x": after})
        assert [d.field for d in compare(saved, live, {})] == ["code.x"]


INNER = st.dictionaries(st.text("abc.", max_size=3), st.integers(), max_size=3)


@given(st.dictionaries(st.text("abc.", max_size=3), INNER, max_size=3))
def test_every_leaf_of_a_description_is_compared(tree: dict[str, dict[str, int]]) -> None:
    leaves = list(flatten("x", tree))
    assert len(leaves) == (sum(len(inner) or 1 for inner in tree.values()) or 1)
    assert all(name.startswith("x") for name, _ in leaves)


def test_the_table_is_readable_and_cuts_what_is_too_long() -> None:
    shown = table([Difference("model_config.n_heads", "8", "2", "must"), Difference("code", "x" * 200, "y", "warn")])
    lines = shown.splitlines()
    assert lines[0].split() == ["field", "in", "the", "checkpoint", "now", "policy"]
    assert lines[1].split() == ["model_config.n_heads", "8", "2", "must"]
    assert lines[2].split()[1] == "x" * 59 + "…"
    assert len({line.index(word) for line, word in zip(lines[1:], ("2", "y"), strict=True)}) == 1
