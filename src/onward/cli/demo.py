"""``onward demo``: a run is killed inside a save, resumed, and shown to be the run that was never killed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from onward.cli.options import JsonOption, closing
from onward.cli.screen import Answer, screen
from onward.errors import ConfigurationError

EPILOG = closing(
    "onward demo --out /tmp/onward-demo",
    {
        2: "a command line that makes no sense, or DIR holds something else",
        3: "something was not proven",
        78: "torch is not installed",
    },
)


def command(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="A new folder: keeps the store, the logs and the report.")
    ] = Path("onward-demo"),
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Decides the instant of the kill and the flipped bit.")
    ] = None,
    as_json: JsonOption = False,
) -> Answer:
    """Prove it: train, kill inside a save, resume.

    A small GPT is trained on real text, killed inside a save and resumed; then it is compared with the same run that
    was never killed, to the last bit, with a flipped bit and a negative control on the way. Takes about two minutes
    on two cores. Ends with a table of what was proven, and a page (report.html) in DIR.
    """
    if find_spec("torch") is None:
        raise ConfigurationError(
            "the demonstration trains a model, and torch is not installed here",
            next_step="pip install 'onward[torch]'",
        )
    from onward.demo.story import run_demo

    result = run_demo(out, screen(aside=as_json, markup=True), seed)
    document = {**json.loads(result.to_json()), "out": str(result.out), "report": str(result.report)}
    return Answer(document, exit_code=result.exit_code)
