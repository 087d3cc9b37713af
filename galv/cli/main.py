"""The `galv` command: which subcommands there are, and how it exits.

Exit status: 0 done, 2 a request that cannot be answered or a training run that failed (one message on standard error),
130 interrupted; `galv run` passes on the status of the rank that failed first, 128 + N when signal N stopped it.
Anything else is a fault of galv's and shows its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from galv import __version__
from galv.cli.calibrate import calibrate
from galv.cli.check import check
from galv.cli.devices import devices
from galv.cli.diff import diff
from galv.cli.estimate import estimate
from galv.cli.graph import graph
from galv.cli.plan import plan
from galv.cli.profile import profile
from galv.cli.run import RunCommand, run
from galv.cli.show import show
from galv.cli.sweep import sweep
from galv.errors import GalvError

app = typer.Typer(
    help="Find the best way to parallelize a PyTorch model on a cluster, and run that very plan.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(plan)
app.command()(estimate)
app.command()(graph)
app.command()(show)
app.command()(check)
app.command()(diff)
app.command()(sweep)
app.command()(profile)
app.command()(calibrate)
app.command()(devices)
app.command(cls=RunCommand)(run)


@app.callback()
def galv(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"galv {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line `arguments` (the process's own by default) and leaves the process with its status."""
    # Not one of a person's models to debug: its libraries' remarks are noise around the answer.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(_status(arguments))


def _status(arguments: Sequence[str] | None) -> int:
    try:
        status = app(args=arguments, prog_name="galv", standalone_mode=False)
    except typer.TyperException as error:
        return _refuse(_usage_message(error))
    except GalvError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return status if isinstance(status, int) else 0


def _refuse(message: str) -> int:
    print(f"galv: {message}", file=sys.stderr)
    return 2


def _usage_message(error: typer.TyperException) -> str:
    """What is wrong with the command line, and where its help is."""
    context = getattr(error, "ctx", None)
    where = "" if context is None else f"\nTry '{context.command_path} --help'."
    return error.format_message() + where


if __name__ == "__main__":
    main()
