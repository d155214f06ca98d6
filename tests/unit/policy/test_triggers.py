"""When a save is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import ConfigurationError
from onward.policy.triggers import TriggerSettings, due

STEPS = st.integers(0, 10**6)


@given(st.integers(1, 1000), STEPS, st.integers(0, 5000))
def test_a_save_is_due_exactly_when_a_multiple_was_reached(every: int, before: int, more: int) -> None:
    """Also for a loop that does not tell every step: it cannot step over a save."""
    multiples = (before + more) // every - before // every
    assert due(TriggerSettings(every_steps=every), before, before + more) == (multiples > 0)


@given(STEPS, STEPS)
def test_without_an_interval_nothing_is_ever_due(before: int, now: int) -> None:
    assert not due(TriggerSettings(every_steps=None), before, now)


def test_the_first_step_is_not_due_and_each_multiple_is_due_once() -> None:
    settings = TriggerSettings(every_steps=5)
    assert [n for n in range(1, 21) if due(settings, n - 1, n)] == [5, 10, 15, 20]
    assert not due(settings, 0, 0)


@pytest.mark.parametrize("every", [0, -1, -500])
def test_an_interval_that_makes_no_sense_is_refused(every: int) -> None:
    with pytest.raises(ConfigurationError, match=str(every)):
        TriggerSettings(every_steps=every)
