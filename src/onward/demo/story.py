"""The story, told live: a run is killed inside a save, resumed, and shown to be the run that was never killed."""

from __future__ import annotations

import random
import secrets
import shlex
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

import onward
from onward.catalog.listing import read_catalog
from onward.catalog.reader import Place
from onward.catalog.stores import open_home
from onward.demo.checks import check_sums, compare_runs, flip_bit
from onward.demo.crash import Kill, kill_inside_save
from onward.demo.evidence import Evidence
from onward.demo.page import render
from onward.demo.process import DemoFailed, Trainer, training_command
from onward.demo.proof import DemoResult, conclude
from onward.errors import UsageError
from onward.format.names import RunPlaces
from onward.records import CheckpointInfo, VerifyReport
from onward.upkeep.verify import verify

PLACES = RunPlaces("demo")
STEPS = 85
EVERY = 15
"""The last commit is of step 75: behind it lie steps that a drill can repeat and compare."""
KILLED_SAVES = (30, 45)
"""One of these saves is cut off: there are commits before it, and saves behind it if the instant comes too late."""
FALLBACK_STEPS = 5
TICK_SECONDS = 0.2
MARKER = "train-command"
"""The file by which a folder is known to be a demonstration's, so that it may be used again."""


def run_demo(out: Path, console: Console, seed: int | None = None) -> DemoResult:
    """Tells the whole story and leaves store, logs, result and report in ``out``.

    Args:
        out: A new or empty folder, or one of an earlier demonstration, which is replaced.
        console: Where it is told.
        seed: Decides the instant of the kill and the bit that is flipped; by default another one each time.

    Returns:
        What was proven, and what not.

    Raises:
        UsageError: ``out`` holds something else.
        DemoFailed: A process failed, or the run ended before a save was hit.
    """
    out = out.absolute()
    _make_room(out)
    chosen = secrets.randbits(32) if seed is None else seed
    began = time.monotonic()
    with Story(out, console, random.Random(chosen)) as story:
        evidence = story.tell()
    result = DemoResult(out, chosen, time.monotonic() - began, evidence, conclude(evidence))
    (out / "result.json").write_text(result.to_json(), encoding="utf-8")
    result.report.write_text(render(result), encoding="utf-8")
    if result.ok:
        # The copies were needed for the negative control and the flipped bit; after a failure they are evidence.
        shutil.rmtree(out / "copies")
    console.print(result.table())
    console.print(
        f"\n[dim]{result.seconds:.0f} s, seed {chosen}; report:[/] {escape(str(result.report))}", soft_wrap=True
    )
    return result


def _make_room(out: Path) -> None:
    """Creates the folder, or clears what an earlier demonstration left in it."""
    if out.exists() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise UsageError(f"{out} is not empty, and not of an earlier demonstration", next_step="name a new folder")
    for name in ("store", "logs", "copies"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("report.html", "result.json", MARKER):
        (out / name).unlink(missing_ok=True)
    (out / "logs").mkdir(parents=True)
    command = [*training_command(), *_saving(out / "store")]
    (out / MARKER).write_text(shlex.join(command) + "\n", encoding="utf-8")


def _saving(store: Path) -> list[str]:
    """The training script's arguments for a run that checkpoints into ``store``."""
    arguments = {"--store": store.as_uri(), "--run": PLACES.run, "--steps": str(STEPS), "--every": str(EVERY)}
    return [part for pair in arguments.items() for part in pair]


class Story:
    """The acts in their order, the processes in them, and the progress on the screen."""

    def __init__(self, out: Path, console: Console, chance: random.Random) -> None:
        self.out = out
        self.chance = chance
        self._cast: dict[Trainer, TaskID] = {}
        self._ticked = 0.0
        columns = (
            TextColumn("  {task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        self._progress = Progress(*columns, console=console)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def tell(self) -> Evidence:
        """The six acts, and the negative control."""
        started = time.time()
        store = self.out / "store"
        run = store / PLACES.root
        onward.init_store(store.as_uri())

        self._act(1, "a reference run that nothing interrupts")
        reference = self._start("reference", "--no-checkpoint")
        self._act(2, f"the same run, a checkpoint every {EVERY} steps, to be killed inside a save")
        first = self._start("run-1", *_saving(store))
        earliest = self.chance.choice(KILLED_SAVES)
        kill = kill_inside_save(first, run, earliest=earliest, chance=self.chance, tick=self._tick)
        self._say_kill(kill)
        newest = _commits(store)[-1]
        after_kill = self._copy(store, "after-kill")

        self._act(3, "started again, with the same command")
        second = self._start("run-2", *_saving(store))
        self._say_resume(second)
        self._wait(reference)
        # The negative control starts as soon as there is a core for it; its story comes last.
        control = self._start("control", *_saving(after_kill), "--skip-rng")
        self._wait(second)

        self._act(4, "compared with the reference, by a process that does not import onward")
        before = compare_runs(reference.log, first.log, log_only=True)
        after = compare_runs(reference.log, second.log)
        for part in after.parts:
            self._say(f"{part}: {'equal to the last bit' if after.equal(part) else 'DIFFERENT'}")

        self._act(5, "one bit flipped in a copy of the newest checkpoint")
        commits = _commits(store)
        damaged, healthy = commits[-1], commits[-2]
        copy = self._copy(store, "damaged")
        flip = flip_bit(copy / PLACES.checkpoint(damaged.folder), self.chance)
        self._say(f"bit {flip.bit} of byte {flip.offset} in {damaged.folder}/{flip.file}")
        report = _verify(copy, damaged)
        for finding in report.findings:
            self._say(f"found: tier {finding.tier}, {finding.file}, tensor {finding.tensor}: {finding.message}")
        fallback = self._start("fallback", *_saving(copy), "--stop-at", str(healthy.step + FALLBACK_STEPS))
        self._say_resume(fallback)

        self._act(6, "the newest checkpoint checked with coreutils alone")
        sums = check_sums(run / "checkpoints" / damaged.folder)
        self._say(f"sha256sum -c: {sums.files} files, {'all' if sums.ok else 'NOT all'} of them right")

        self._act(7, "the negative control: a resume without the random state has to differ")
        self._wait(control, fallback)
        return Evidence(
            started=started,
            reference=reference.life(),
            first=first.life(),
            second=second.life(),
            kill=kill,
            newest=newest,
            commits=tuple(commits),
            before_kill=before,
            after_kill=after,
            control=control.life(),
            control_comparison=compare_runs(reference.log, control.log),
            flip=flip,
            damaged=damaged,
            healthy=healthy,
            verified=report,
            fallback=fallback.life(),
            fallback_comparison=compare_runs(reference.log, fallback.log, log_only=True),
            sums=sums,
        )

    def _act(self, number: int, text: str) -> None:
        self._progress.console.print(f"[bold]{number}[/]  {text}", highlight=False)

    def _say(self, text: str) -> None:
        self._progress.console.print(f"   [dim]{escape(text)}[/]", highlight=False, soft_wrap=True)

    def _say_kill(self, kill: Kill) -> None:
        instant, usual = f"{kill.delay * 1e3:.1f} ms", f"{kill.usual * 1e3:.0f} ms"
        self._say(f"SIGKILL {instant} into the save of step {kill.save.step} (one takes {usual})")
        self._say(f"on disk: {kill.save.folder.name} with its intent, {kill.files} files, {kill.bytes / 1e6:.1f} MB")
        self._say(f"not on disk: ledger entry {kill.save.sequence}")

    def _say_resume(self, trainer: Trainer) -> None:
        while (answer := trainer.resumed()) is None:
            if not trainer.running and trainer.resumed() is None:
                raise DemoFailed(f"the training process {trainer.name!r} ended without resuming")
            self._pause()
        for outcome in answer["recovered"]:
            self._say(f"attempt at step {outcome['step']}: {outcome['outcome']}, {outcome['reason']}")
        for rejection in answer["rejected"]:
            self._say(f"refused: {rejection['folder']}: {'; '.join(rejection['reasons'])}")
        self._say(f"chosen: {answer['checkpoint']}, next step {answer['next_step']}")

    def _start(self, name: str, *arguments: str) -> Trainer:
        trainer = self._stack.enter_context(Trainer(name, self.out / "logs", arguments))
        self._cast[trainer] = self._progress.add_task(name, total=STEPS, loss="")
        return trainer

    def _copy(self, store: Path, name: str) -> Path:
        copy = self.out / "copies" / name
        shutil.copytree(store, copy)
        return copy

    def _tick(self) -> None:
        """Brings the bars up to date, a few times a second however often it is called."""
        if time.monotonic() - self._ticked < TICK_SECONDS:
            return
        self._ticked = time.monotonic()
        for trainer, task in self._cast.items():
            if losses := trainer.losses():
                step, loss = losses[-1]
                self._progress.update(task, completed=step + 1, loss=f"loss {loss:.3f}")

    def _pause(self) -> None:
        self._tick()
        time.sleep(TICK_SECONDS / 4)

    def _wait(self, *trainers: Trainer) -> None:
        while any(trainer.running for trainer in trainers):
            self._pause()
        self._ticked = 0.0
        self._tick()


def _commits(store: Path) -> list[CheckpointInfo]:
    """What may be resumed from, oldest first."""
    home, record = open_home(store.as_uri())
    return read_catalog(home, PLACES, record.tier).offered()[::-1]


def _verify(store: Path, info: CheckpointInfo) -> VerifyReport:
    """Verifies every byte of one checkpoint, as ``onward verify --full`` does."""
    home, record = open_home(store.as_uri())
    place = Place(home, PLACES.checkpoint(info.folder), record.tier, info.folder)
    return verify(place, info, run=PLACES.run)
