"""Figures: raw samples, and everything that is said about them, computed in one place and open to recomputation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any


def ratio_of(samples: Sequence[float], reference_samples: Sequence[float]) -> float | None:
    """The median of the ratios of the pairs; None without a reference.

    Pair by pair, because both halves of a pair were measured within seconds of each other: what the machine did
    meanwhile to one, it did to the other.

    Raises:
        ValueError: The samples are not pairs.
    """
    if not reference_samples:
        return None
    if len(samples) != len(reference_samples):
        raise ValueError(f"{len(samples)} samples and {len(reference_samples)} of the reference are not pairs")
    return median(one / other for one, other in zip(samples, reference_samples, strict=True))


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        figure: What was measured.
        unit: Of the samples and of the reference's.
        samples: One for each round.
        reference_samples: What it is held against, measured in the same rounds; empty for none.
        against: The reference's name.
        bar: The highest ratio that is good enough; None where nothing is promised.
        note: How it was measured, and what must be known to read it.
    """

    figure: str
    unit: str
    samples: Sequence[float]
    reference_samples: Sequence[float] = ()
    against: str = ""
    bar: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The figure as it is written to the results."""
        ratio = ratio_of(self.samples, self.reference_samples)
        return {
            "figure": self.figure,
            "value": median(self.samples),
            "unit": self.unit,
            "reference": median(self.reference_samples) if self.reference_samples else None,
            "against": self.against,
            "ratio": ratio,
            "bar": self.bar,
            "ok": None if self.bar is None or ratio is None else ratio <= self.bar,
            "samples": list(self.samples),
            "reference_samples": list(self.reference_samples),
            "note": self.note,
        }


def differences(document: Mapping[str, Any]) -> list[str]:
    """What a result file says that does not follow from its own raw samples; empty when all of it does."""
    found: list[str] = []
    for said in document["figures"]:
        due = Figure(
            figure=said["figure"],
            unit=said["unit"],
            samples=said["samples"],
            reference_samples=said["reference_samples"],
            against=said["against"],
            bar=said["bar"],
            note=said["note"],
        ).as_dict()
        found += [
            f"{said['figure']}: {name} is {said.get(name)!r}, and should be {value!r}"
            for name, value in due.items()
            if said.get(name) != value
        ]
    return found


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a result file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
