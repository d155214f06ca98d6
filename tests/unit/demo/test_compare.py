"""The comparing script finds a single differing bit in each thing it compares, and nothing where nothing differs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from onward.demo import compare

Steps = list[dict[str, Any]]
State = dict[str, Any]


def steps() -> Steps:
    return [
        {"step": n, "loss": (4.5 / (n + 1)).hex(), "lr": (0.001 * n).hex(), "samples": [n, n + 7], "time": n * 0.2}
        for n in range(6)
    ]


def state() -> State:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    return {"parameter.w": values, "parameter.b": values[0].copy(), "moment.exp_avg.w": values / 7}


def write(path: Path, lines: Steps, tensors: State, facts: dict[str, str] | None = None) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"event": "resume"}, *lines]), encoding="utf-8")
    save_file(tensors, path.with_suffix(".safetensors"), metadata=facts or {"rng.torch": "aa"})
    return path


def run(*arguments: object) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-I", compare.__file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def different(tmp_path: Path, lines: Steps, tensors: State, facts: dict[str, str] | None = None) -> set[str]:
    reference = write(tmp_path / "a.jsonl", steps(), state())
    code, answer = run(reference, write(tmp_path / "b.jsonl", lines, tensors, facts))
    assert answer["without_onward"] is True
    found = {name for name, part in answer["compared"].items() if not part["equal"]}
    assert (code, answer["equal"]) == ((3, False) if found else (0, True))
    return found


def test_equal_runs_are_equal_although_the_clock_differs(tmp_path: Path) -> None:
    later = [{**line, "time": line["time"] + 100.0} for line in steps()]
    assert different(tmp_path, later, state()) == set()


def test_a_resumed_run_is_compared_from_its_first_step(tmp_path: Path) -> None:
    assert different(tmp_path, steps()[3:], state()) == set()


def one_bit(value: float) -> str:
    return math.nextafter(value, math.inf).hex()


@pytest.mark.parametrize(
    ("title", "field", "change"),
    [
        ("loss", "loss", lambda text: one_bit(float.fromhex(text))),
        ("learning rate", "lr", lambda text: one_bit(float.fromhex(text))),
        ("samples", "samples", lambda ids: [ids[0], ids[1] ^ 1]),
        ("samples", "samples", lambda ids: ids[::-1]),
    ],
)
def test_one_bit_in_the_log_is_found(tmp_path: Path, title: str, field: str, change: Callable[[Any], Any]) -> None:
    lines = steps()
    lines[4][field] = change(lines[4][field])
    assert different(tmp_path, lines, state()) == {title}


@pytest.mark.parametrize(
    ("name", "title"), [("parameter.w", "parameters"), ("parameter.b", "parameters"), ("moment.exp_avg.w", "moments")]
)
@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_in_a_tensor_is_found(tmp_path: Path, name: str, title: str, bit: int) -> None:
    tensors = state()
    # Bit 31 of the first value turns 0.0 into -0.0, which a comparison of values would take for equal.
    tensors[name].view(np.uint32).reshape(-1)[0] ^= np.uint32(1 << bit)
    assert different(tmp_path, steps(), tensors) == {title}


def test_a_nan_with_equal_bits_is_equal(tmp_path: Path) -> None:
    tensors = {**state(), "parameter.w": np.full((2, 2), np.nan, dtype=np.float32)}
    reference = write(tmp_path / "a.jsonl", steps(), tensors)
    code, _ = run(reference, write(tmp_path / "b.jsonl", steps(), tensors))
    assert code == 0


def test_another_dtype_or_shape_or_a_missing_tensor_is_found(tmp_path: Path) -> None:
    tensors = state()
    assert different(tmp_path, steps(), {**tensors, "parameter.w": tensors["parameter.w"].reshape(4, 3)}) == {
        "parameters"
    }
    assert different(tmp_path, steps(), {**tensors, "parameter.w": tensors["parameter.w"].view(np.int32)}) == {
        "parameters"
    }
    del tensors["moment.exp_avg.w"]
    assert different(tmp_path, steps(), tensors) == {"moments"}


def test_another_random_state_is_found(tmp_path: Path) -> None:
    assert different(tmp_path, steps(), state(), {"rng.torch": "ab"}) == {"random states"}


@pytest.mark.parametrize("lines", [steps()[:-1], [*steps()[:2], *steps()[3:]], []])
def test_a_missing_step_is_found(tmp_path: Path, lines: Steps) -> None:
    assert different(tmp_path, lines, state()) == {"loss", "learning rate", "samples"}


def test_a_step_too_many_is_found(tmp_path: Path) -> None:
    assert different(tmp_path, [*steps(), {**steps()[-1], "step": 6}], state()) == {"loss", "learning rate", "samples"}


def test_log_only_takes_a_run_that_ended_early_and_a_torn_last_line(tmp_path: Path) -> None:
    reference = write(tmp_path / "a.jsonl", steps(), state())
    torn = tmp_path / "b.jsonl"
    torn.write_text("".join(json.dumps(line) + "\n" for line in steps()[1:4]) + '{"step": 4, "lo', encoding="utf-8")
    code, answer = run("--log-only", reference, torn)
    assert code == 0
    assert answer["compared"]["loss"]["compared"] == 3
    assert set(answer["compared"]) == {"loss", "learning rate", "samples"}
    torn.write_text("", encoding="utf-8")
    code, _ = run("--log-only", reference, torn)
    assert code == 3, "nothing compared is nothing proven"
