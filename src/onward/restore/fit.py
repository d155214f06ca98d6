"""Whether a checkpoint fits this program: components, keys, shapes, configuration. Looks only; touches nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from onward.catalog.reader import OpenCheckpoint
from onward.errors import (
    FormatError,
    IncompatibleConfiguration,
    IncompatibleState,
    IncompleteState,
    OnwardError,
    TopologyMismatch,
)
from onward.policy.compatibility import Difference, Policy, compare, policy_of, table
from onward.records import Description, JsonTree
from onward.restore.load import CheckpointSource
from onward.state.component import Component
from onward.state.optimizer import OptimizerComponent
from onward.state.scheduler import SchedulerComponent
from onward.state.snapshot import rebuild

T = TypeVar("T")


@dataclass(frozen=True)
class Fit:
    """What was found out without touching anything live.

    Attributes:
        differences: All configuration differences that were let through.
        keep: Scheduler component → fields of its schedule that stay as they are now, because the user relaxed them.
    """

    differences: tuple[Difference, ...] = ()
    keep: Mapping[str, frozenset[str]] = field(default_factory=dict)


def check_components(
    opened: OpenCheckpoint, components: Sequence[Component], waive: Collection[str], *, model_only: bool
) -> list[Component]:
    """The registered components that are to be loaded.

    Raises:
        IncompleteState: One is missing on either side, and not waived.
    """
    saved = {tag.name: tag for tag in opened.manifest.components}
    if model_only:
        wanted = [component for component in components if component.kind == "model"]
        if missing := [component.name for component in wanted if component.name not in saved]:
            raise IncompleteState(f"{opened.place.name} has no weights called {', '.join(missing)}")
        return wanted
    live = {component.name for component in components}
    problems = [
        f"the component {name!r} is registered, but not in the checkpoint"
        for name in sorted(live - set(saved) - set(waive))
    ]
    problems += [
        f"the checkpoint has a component {name!r} ({saved[name].kind}) that is not registered"
        for name in sorted(set(saved) - live - set(waive))
    ]
    problems += [
        f"the component {c.name!r} is a {c.kind} here and a {saved[c.name].kind} in the checkpoint"
        for c in components
        if c.name in saved and saved[c.name].kind != c.kind
    ]
    if problems:
        raise IncompleteState(f"{opened.place.name}: {'; '.join(problems)}")
    return [component for component in components if component.name in saved and component.name not in waive]


def check_world(opened: OpenCheckpoint, world_size: int) -> None:
    """Refuses another number of ranks than the saved one."""
    if opened.manifest.world_size != world_size:
        raise TopologyMismatch(
            f"{opened.place.name} was saved by {opened.manifest.world_size} ranks; this job has {world_size}"
        )


def check_fit(
    source: CheckpointSource,
    trees: Mapping[str, JsonTree],
    saved: Description,
    live: Description,
    components: Sequence[Component],
    policies: Mapping[str, Policy],
) -> Fit:
    """Compares configuration, then keys, shapes and dtypes, before a byte of a tensor is read.

    Raises:
        IncompatibleConfiguration: A field that must match differs; the message is a table.
        IncompatibleState: Names every key that does not fit, with both shapes.
        FormatError: A component's saved state has another form than such a component ever writes.
    """
    differences = compare(saved, live, policies)
    _refuse(differences)
    views = {c.name: rebuild(trees[c.name], source.meta) for c in components}
    problems = [
        problem
        for component in components
        for problem in _formed(component.name, component.check, views[component.name])
    ]
    if problems:
        raise IncompatibleState("the checkpoint does not fit the live state:\n  " + "\n  ".join(problems[:50]))
    keep: dict[str, frozenset[str]] = {}
    for component in components:
        view = views[component.name]
        if isinstance(component, SchedulerComponent):
            changed = [
                Difference(f"schedule.{name}", repr(before), repr(now), policy_of(f"schedule.{name}", policies))
                for name, now, before in _formed(component.name, component.static_differences, view)
            ]
            relaxed = (d.field.removeprefix("schedule.") for d in changed if d.policy != "must")
            keep[component.name] = frozenset(relaxed)
            differences += changed
        elif isinstance(component, OptimizerComponent):
            differences += [
                Difference(f"optimizer.{name}", repr(before), repr(now), policy_of(f"optimizer.{name}", policies))
                for name, now, before in _formed(component.name, component.differences, view)
            ]
    _refuse(differences)
    return Fit(differences=tuple(d for d in differences if d.policy != "ignore"), keep=keep)


def _formed(name: str, look: Callable[[object], list[T]], view: object) -> list[T]:
    """What ``look`` finds; a state of another form than it can read is damage, not a crash."""
    try:
        return look(view)
    except OnwardError:
        raise
    except Exception as error:
        raise FormatError(f"the state of {name!r} is of another form: {type(error).__name__}: {error}") from error


def check_counters(opened: OpenCheckpoint, components: Sequence[Component]) -> None:
    """After the load: every component counts as far as it did when it was saved.

    Raises:
        IncompatibleState: A counter has another value; the state was applied, but is not what was saved.
    """
    saved = {tag.name: tag.counters for tag in opened.manifest.components}
    wrong = [
        f"{component.name}: {component.counters()} instead of {saved[component.name]}"
        for component in components
        if component.counters() != saved[component.name]
    ]
    if wrong:
        raise IncompatibleState(
            f"after the load the counters are not those of step {opened.manifest.global_step}: {'; '.join(wrong)}",
            next_step="the component's load_state_dict did not restore all of it; this process must not go on",
        )


def _refuse(differences: Sequence[Difference]) -> None:
    binding = [difference for difference in differences if difference.policy == "must"]
    if binding:
        raise IncompatibleConfiguration(
            f"the configuration differs from the checkpoint's in {len(binding)} field(s) that must match:\n"
            + table(differences)
        )
