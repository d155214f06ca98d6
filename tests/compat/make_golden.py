"""Makes the golden stores of the current format: ``PYTHONPATH=tests python tests/compat/make_golden.py``.

Run once per format and commit what it writes. A store of a released format is never made again: that it can still be
read, byte for byte, is what the test is for. (Before the first release it may be.)
"""

from __future__ import annotations

import getpass
import hashlib
import json
import shutil
import socket
from pathlib import Path

import golden_state
import torch

import onward
from onward.catalog.deletion import delete_checkpoint
from onward.catalog.incarnation import begin
from onward.catalog.ledger import read_ledger
from onward.catalog.voids import give_up_number
from onward.save.commit import append_commit, begin_attempt, seal
from onward.save.shards import write_rank
from onward.upkeep.adopt import adopt
from support import RUN, captured, context

GOLDEN = Path(__file__).resolve().parent / "format-1"


def user_run(url: str) -> None:
    """Every dtype and every kind of value, four commits, one deleted, one adopted, an attempt that was given up."""
    held = golden_state.Held(golden_state.state(golden_state.STEPS[0]))
    config = onward.Config(
        store=url,
        run=RUN,
        triggers=onward.TriggerSettings(every_steps=None),
        save=onward.SaveSettings(writer="thread"),
    )
    described = onward.describe(model_config={"n_heads": 2}, assets=golden_state.ASSETS, code=False)
    with onward.Checkpointer(config, describe=described, everything=held) as saver:
        saver.resume()
        for step in golden_state.STEPS:
            held.state = golden_state.state(step)
            saver.save(step, reason="golden", wait=True)
    run = begin(url, RUN)
    first, *_, last = read_ledger(run.store, run.places).live()
    delete_checkpoint(run.ledger, read_ledger(run.store, run.places), first, tier=run.tier, reason="golden")
    give_up_number(run.ledger, "0" * 32, "golden")
    root = Path(url.removeprefix("file://")) / run.places.checkpoints
    shutil.copytree(root / last.folder, root / "copied-in")
    adopt(run, "copied-in")
    begin_attempt(run.store, run.ledger, step=99, world_size=1, pid=1)
    run.end()


def three_ranks(url: str) -> None:
    """A checkpoint that three ranks wrote."""
    run = begin(url, "three")
    attempt = begin_attempt(run.store, run.ledger, step=70, world_size=3, pid=1)
    folder = run.places.checkpoint(attempt.writing)
    states = [captured(70, rank=rank, world_size=3) for rank in range(3)]
    records = [
        write_rank(
            run.store,
            folder,
            state,
            context(rank=rank, world_size=3),
            run="three",
            attempt=attempt.id,
            threads=1,
        )
        for rank, state in enumerate(states)
    ]
    times = {"capture_started": "t", "epoch": None, "data_position": None}
    digests = seal(run.store, run.ledger, attempt, records, states[0].layout, context(world_size=3), **times)
    append_commit(run.ledger, attempt, *digests)
    run.end()


def trained_run(url: str) -> dict[str, object]:
    """A real run; returns what a resume of it must give."""
    saver, model, optimizer, scheduler = golden_state.training(url)
    with saver:
        saver.resume()
        golden_state.train(model, optimizer, scheduler, 4)
        saver.save(4, wait=True)
        return {"losses": golden_state.train(model, optimizer, scheduler, 3)}


def main() -> None:
    if GOLDEN.exists():
        raise SystemExit(f"{GOLDEN} is there; a released golden store is never made again")
    # Who made it, and where, is nobody's concern.
    socket.gethostname, getpass.getuser = lambda: "golden", lambda: "golden"
    url = f"file://{GOLDEN / 'store'}"
    onward.init_store(url)
    user_run(url)
    three_ranks(url)
    expected: dict[str, object] = {
        "onward": onward.__version__,
        "torch": torch.__version__,
        "trained": trained_run(url),
    }
    files = sorted(path for path in (GOLDEN / "store").rglob("*") if path.is_file())
    expected["files"] = {
        str(path.relative_to(GOLDEN / "store")): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    (GOLDEN / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files)} bytes")


if __name__ == "__main__":
    main()
