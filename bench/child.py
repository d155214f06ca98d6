"""One measurement in a process of its own, so that none inherits another's memory, threads or caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.state import Size

_ROOT = Path(__file__).resolve().parents[1]


class MeasurementFailed(RuntimeError):
    """A measurement ended with an error; the message is what its process said."""


def run(
    where: str, folder: Path, size: Size, *, watch: Callable[[int], None] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Runs ``bench.<module>:<function>`` in a fresh process.

    Args:
        where: ``module:function``.
        folder: The function's own folder; it must not exist, unless the function expects it.
        size: How large everything is.
        watch: Called with the process's id again and again while it runs.
        arguments: For the function; plain values.

    Raises:
        MeasurementFailed: Says what the process said.
    """
    request = json.dumps([where, str(folder), size.as_dict(), arguments])
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    python_path = os.pathsep.join([*given, str(_ROOT), str(_ROOT / "src")])
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.child", request, answer.name],
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path},
        )
        try:
            while watch is not None and process.poll() is None:
                watch(process.pid)
                time.sleep(0.005)
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if code != 0:
            said.seek(0)
            raise MeasurementFailed(f"{where} ended with {code}:\n{said.read()[-4000:]}")
        result: dict[str, Any] = json.load(answer)
        return result


def main() -> None:
    """The process's side."""
    (where, folder, size, arguments), answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    module, _, function = where.partition(":")
    found = getattr(import_module(f"bench.{module}"), function)(Path(folder), Size(**size), **arguments)
    answer.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
