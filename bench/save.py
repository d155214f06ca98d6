"""``make bench``: what saving costs a training run, against what the machine allows and what other libraries do.

Every figure is measured in a process of its own, both sides in turn, and written with its raw samples.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import screen
from bench.figures import Figure, write
from bench.machine import machine, today, versions
from bench.parts import Bench
from bench.rivals import facts
from bench.state import FULL, QUICK, Size

_RESULTS = Path(__file__).parent / "results"
_FINDING = 3


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the tables, writes the results; 0 if every bar holds, else 3."""
    parser = argparse.ArgumentParser(prog="python -m bench.save", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the size, one round; bars mean nothing")
    parser.add_argument("--only", action="append", metavar="PART", help="one part; may be given again")
    parser.add_argument("--rounds", type=int, metavar="N", help="pairs of samples for each figure")
    parser.add_argument("--scratch", type=Path, help="a new folder to write into, on the filesystem that is measured")
    parser.add_argument("--out", type=Path, help="the result file")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    if options.rounds:
        size = Size(**{**size.as_dict(), "rounds": options.rounds, "rival_rounds": options.rounds})
    out = options.out or (_RESULTS / ("raw/save-quick.json" if options.quick else "save.json"))
    scratch = options.scratch or _RESULTS / "raw" / "scratch"
    progress = Console(stderr=True)
    bench = Bench(scratch, size, lambda text: progress.print(f"  {text}", style="dim", highlight=False))
    parts = bench.parts()
    if unknown := set(options.only or ()) - set(parts):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if options.scratch and scratch.exists():
        parser.error(f"{scratch} is there already; it would be removed")
    shutil.rmtree(scratch, ignore_errors=True)  # what a run that was broken off left behind
    scratch.mkdir(parents=True)
    where, started = machine(scratch), time.perf_counter()
    figures: list[Figure] = []
    try:
        for name in options.only or parts:
            figures += parts[name]()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    rows = [figure.as_dict() for figure in figures]
    document: dict[str, Any] = {
        "benchmark": "save",
        "quick": options.quick,
        "date": today(),
        "seconds": round(time.perf_counter() - started, 1),
        "machine": where,
        "versions": versions(),
        "libraries": facts(),
        "figures": rows,
    }
    write(out, document)
    screen.show(screen.console(), document)
    progress.print(f"{out}, in {document['seconds']:.0f} s", style="dim", highlight=False)
    missed = any(row["ok"] is False for row in rows)
    return _FINDING if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
