"""Whether the described configuration of a checkpoint and of this program go together, field by field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from onward.errors import ConfigurationError
from onward.records import Description, JsonTree

Policy = Literal["must", "warn", "ignore"]
POLICIES: tuple[Policy, ...] = ("must", "warn", "ignore")

DEFAULT_POLICY: dict[str, Policy] = {
    "model_config*": "must",
    "tokenizer*": "must",
    "dataset*": "must",
    "hyperparameters*": "must",
    "schedule*": "must",
    "optimizer*": "warn",
    "code*": "warn",
    "environment*": "ignore",
    "environment.torch": "warn",
}
"""Pattern → policy; a longer pattern wins over a shorter one, the user's over these."""

_DEEPEST = 32
_ABSENT = "(not described)"


@dataclass(frozen=True)
class Difference:
    """One field that differs; ``saved`` and ``live`` as they are shown to a person."""

    field: str
    saved: str
    live: str
    policy: Policy


def policy_of(field: str, policies: Mapping[str, Policy]) -> Policy:
    """The policy for a field: the longest matching pattern of the user's, else of the defaults, else ``must``."""
    for table in (policies, DEFAULT_POLICY):
        matching = [pattern for pattern in table if fnmatchcase(field, pattern)]
        if matching:
            return table[max(matching, key=len)]
    return "must"


def check_policies(policies: Mapping[str, str]) -> dict[str, Policy]:
    """The user's policies, if each is one that exists.

    Raises:
        ConfigurationError: Names the field and the choices.
    """
    checked: dict[str, Policy] = {}
    for field, wanted in policies.items():
        found = next((policy for policy in POLICIES if policy == wanted), None)
        if found is None:
            raise ConfigurationError(f"resume.policy: {field!r} is {wanted!r}", next_step=f"use one of {POLICIES}")
        checked[field] = found
    return checked


def compare(saved: Description, live: Description, policies: Mapping[str, Policy]) -> list[Difference]:
    """Every field in which two descriptions differ, with what is to be done about it.

    A part that only one side describes is shown, but is never more than a warning: nothing can be compared.
    """
    differences: list[Difference] = []
    for part in ("model_config", "tokenizer", "dataset", "hyperparameters", "code", "environment"):
        before, after = getattr(saved, part), getattr(live, part)
        if before is None and after is None:
            continue
        if before is None or after is None:
            policy = policy_of(part, policies)
            if policy != "ignore":
                shown = (_ABSENT if before is None else "described", _ABSENT if after is None else "described")
                differences.append(Difference(part, *shown, policy="warn"))
            continue
        differences.extend(fields(dict(flatten(part, before)), dict(flatten(part, after)), policies))
    return differences


def fields(saved: Mapping[str, str], live: Mapping[str, str], policies: Mapping[str, Policy]) -> list[Difference]:
    """The differing fields of two flat tables, those with the policy ``ignore`` left out."""
    found: list[Difference] = []
    for name in sorted({*saved, *live}):
        before, after = saved.get(name, "(absent)"), live.get(name, "(absent)")
        policy = policy_of(name, policies)
        if before != after and policy != "ignore":
            found.append(Difference(name, before, after, policy))
    return found


def flatten(name: str, tree: JsonTree, depth: int = 0) -> Iterable[tuple[str, str]]:
    """The leaves of a tree as dotted names and shown values; a list is one leaf, and so is what lies too deep."""
    if isinstance(tree, dict) and tree and depth < _DEEPEST:
        for key, value in tree.items():
            yield from flatten(f"{name}.{key}", value, depth + 1)
    else:
        yield name, repr(tree)


def table(differences: Iterable[Difference]) -> str:
    """The differences as a person reads them, one line a field."""
    rows = [("field", "in the checkpoint", "now", "policy")]
    rows += [(d.field, _short(d.saved), _short(d.live), d.policy) for d in differences]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
