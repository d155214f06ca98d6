"""The command line's entry, and the only place that ends the process with a code.

No error reaches a user as a traceback: an error of the tree is told with what to do next; any other is a defect,
whose traceback goes to a file that is named.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text
from typer.main import get_command

from onward._version import __version__
from onward.cli import adopt, demo, init, ls, recover, show, verify
from onward.cli.screen import Answer, screen, wrapped
from onward.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE, OnwardError
from onward.report.tables import plain

EXIT_INTERRUPTED = 130
ENV_DEBUG = "ONWARD_DEBUG"
_COMMANDS = {"demo": demo, "init": init, "ls": ls, "show": show, "verify": verify, "recover": recover, "adopt": adopt}

app = typer.Typer(
    rich_markup_mode=None,  # the help ends with tables of its own, whose lines must stay lines
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _name, _module in _COMMANDS.items():
    app.command(_name, epilog=_module.EPILOG)(_module.command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onward {__version__}")
        raise typer.Exit


@app.callback(epilog="\b\nExample:\n  onward ls --store file:///data/ckpt")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Onward keeps a training run recoverable: it saves the whole state, proves it, and brings the job back."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: The words after the program's name; by default those of this process.

    Returns:
        The exit code; see ``onward.errors``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show must not end it
    code = _run(words or ["--help"], as_json="--json" in words)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _stdout_is_gone()
    return code


def _run(words: list[str], *, as_json: bool) -> int:
    try:
        answer = get_command(app).main(args=words, prog_name="onward", standalone_mode=False)
    except OnwardError as error:
        return _tell(error.code, error.message, error.next_step, error.exit_code, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        answer = EXIT_INTERRUPTED
    except BrokenPipeError:
        _stdout_is_gone()
        return EXIT_OK
    except SystemExit as error:  # shell completion, or a console whose reader is gone
        return error.code if isinstance(error.code, int) else EXIT_ERROR
    except Exception as error:
        return _misused(error, as_json=as_json) if _is_misuse(error) else _defect(error, as_json=as_json)
    if isinstance(answer, Answer):
        _print(answer.json() if as_json else answer.text())
        return answer.exit_code
    if answer == EXIT_INTERRUPTED:
        return _tell("interrupted", "interrupted", "", EXIT_INTERRUPTED, as_json=as_json)
    return answer if isinstance(answer, int) else EXIT_OK


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _stdout_is_gone()


def _stdout_is_gone() -> None:
    """The reader has ended (``| head``): what is still buffered goes nowhere, so that the end is quiet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _tell(code: str, message: str, next_step: str, exit_code: int, *, as_json: bool) -> int:
    if as_json:
        error = {"code": code, "message": message, "next_step": next_step, "exit_code": exit_code}
        _print(json.dumps({"error": error}, indent=2) + "\n")
    else:
        console = screen(aside=True)
        for label, style, words in (("error", "bold red", message), ("next", "bold", next_step)):
            if words:
                lines = "\n".join(plain(line) for line in words.split("\n"))
                text = Text(wrapped(f"{label}: {lines}", console.width))
                text.stylize(style, 0, len(label) + 1)
                console.print(text, soft_wrap=True)
    return exit_code


def _is_misuse(error: Exception) -> bool:
    # The classes of these errors have moved between versions of typer; what they have in common has not.
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == EXIT_USAGE


def _misused(error: Exception, *, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "onward")
    message = str(error.format_message())  # type: ignore[attr-defined]
    return _tell("usage", message, f"see {path} --help", EXIT_USAGE, as_json=as_json)


def _defect(error: Exception, *, as_json: bool) -> int:
    told = "".join(traceback.format_exception(error))
    if os.environ.get(ENV_DEBUG):
        sys.stderr.write(told)
        next_step = "report it with the traceback above"
    else:
        handle, path = tempfile.mkstemp(prefix="onward-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(told)
        next_step = f"the traceback is in {path} ({ENV_DEBUG}=1 shows it); please report it"
    first = next(iter(str(error).splitlines()), "")
    message = f"unexpected {type(error).__name__}: {first}" if first else f"unexpected {type(error).__name__}"
    return _tell("defect", message, next_step, EXIT_ERROR, as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
