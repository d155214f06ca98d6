"""Compares two training runs to the last bit; a plain script that needs nothing of Onward.

``python -I compare.py A.jsonl B.jsonl``: from B's first step to A's last, both logs must hold every step with the same
loss, learning rate and samples; and every tensor of ``B.safetensors``, beside the log, must have the dtype, shape and
bytes of the one in ``A.safetensors``. With ``--log-only`` in front B may have ended early, and only the steps in its
log are compared. Prints the verdict as JSON; ends with 0 if all is equal and with 3 if not.
Run with ``-I`` on the file's path, the interpreter sees neither this package nor its environment, so a fault in
Onward cannot vouch for itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

LOGGED = {"loss": "loss", "learning rate": "lr", "samples": "samples"}
STATE = {"parameters": "parameter.", "moments": "moment."}
SHOWN = 5
"""How many differences are listed; all are counted."""

Verdict = dict[str, Any]


def verdict(compared: int, differing: list[str], **facts: object) -> Verdict:
    """Equal only if something was compared: an empty comparison proves nothing."""
    equal = compared > 0 and not differing
    return {
        "equal": equal,
        "compared": compared,
        "differing": len(differing),
        "differences": differing[:SHOWN],
        **facts,
    }


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """The step lines of a log, by step; a last line that a kill cut short is none."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["step"]: line for line in lines if "step" in line}


def compare_logs(reference: Path, other: Path, to_the_end: bool) -> dict[str, Verdict]:
    """Compares what each later step logged; floats are logged as hexadecimal, so equal text is equal bits."""
    expected, found = read_steps(reference), read_steps(other)
    last = max([*found, *(expected if to_the_end else ())], default=-1)
    # A step that is missing in between is a difference.
    steps = range(min(found, default=0), last + 1)
    result: dict[str, Verdict] = {}
    for title, field in LOGGED.items():
        differing = [
            f"step {step}: {expected.get(step, {}).get(field)} became {found.get(step, {}).get(field)}"
            for step in steps
            if step not in expected or step not in found or expected[step][field] != found[step][field]
        ]
        result[title] = verdict(len(steps), differing, first_step=steps.start, last_step=steps.stop - 1)
    return result


def compare_states(reference: Path, other: Path) -> dict[str, Verdict]:
    """Compares the two final states tensor by tensor, and the digests of the random states."""
    with safe_open(reference, "numpy") as expected, safe_open(other, "numpy") as found:
        names = sorted({*expected.keys(), *found.keys()})
        result: dict[str, Verdict] = {}
        for title, prefix in STATE.items():
            chosen = [name for name in names if name.startswith(prefix)]
            differing, nbytes = [], 0
            for name in chosen:
                if name not in expected.keys() or name not in found.keys():  # noqa: SIM118 - not a dict
                    differing.append(f"{name} is missing")
                    continue
                a, b = expected.get_tensor(name), found.get_tensor(name)
                nbytes += a.nbytes
                # Bytes, not values: -0.0 == 0.0, and a NaN equals nothing.
                if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
                    differing.append(name)
            result[title] = verdict(len(chosen), differing, bytes=nbytes)
        a, b = expected.metadata() or {}, found.metadata() or {}
        facts = sorted({*a, *b})
        differing = [name for name in facts if a.get(name) != b.get(name)]
        result["random states"] = verdict(len(facts), differing, names=facts)
    return result


def main(arguments: list[str]) -> int:
    """Compares, prints, and returns the exit code."""
    log_only = arguments[:1] == ["--log-only"]
    reference, other = (Path(argument) for argument in arguments[log_only:])
    result = compare_logs(reference, other, to_the_end=not log_only)
    if not log_only:
        result |= compare_states(reference.with_suffix(".safetensors"), other.with_suffix(".safetensors"))
    equal = all(part["equal"] for part in result.values())
    independent = not any(name.split(".")[0] == "onward" for name in sys.modules)
    sys.stdout.write(json.dumps({"equal": equal, "without_onward": independent, "compared": result}, indent=2) + "\n")
    return 0 if equal else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
