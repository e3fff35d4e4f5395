"""Which command was asked for? Loads it, runs it, and turns its errors into a sentence and an exit code."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from gpufleet.cli.output import print_error, print_json
from gpufleet.cli.spelling import normalize
from gpufleet.errors import GpufleetError

COMMANDS = ("devices", "migrate", "build")


def run(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name; return its exit code."""
    try:
        _app(args=normalize(arguments), prog_name="gpufleet")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


HELP = {"help_option_names": ["--help", "-h"]}


class LazyCommands(typer.core.TyperGroup):
    """A group whose commands are imported when they are named, so that one costs nothing to another."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, for help to show."""
        return _without_types_of_flags(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order that help shows."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the command `cmd_name`; None if there is none."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is named, or say which one could have been meant."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            import difflib  # only for an error

            message = getattr(error, "message", "")
            close = difflib.get_close_matches(args[0], COMMANDS, n=1) if args else []
            if close and "No such command" in message:
                error.message = f"{message} Did you mean {close[0]!r}?"  # type: ignore[attr-defined]
            raise


class Command(typer.core.TyperCommand):
    """A command whose every usage error prints the usage, also that of an option without its value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options, for help to show."""
        return _without_types_of_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and note in an error that does not know it which command it is about."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise


@functools.cache
def load_command(name: str) -> Any:
    """Import `gpufleet.cli.<name>` and make its function of that name a command."""
    function = getattr(importlib.import_module(f"gpufleet.cli.{name}"), name)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=Command, context_settings=HELP)(_explained(function))
    return typer.main.get_command(single)


def _without_types_of_flags(params: list[Any]) -> list[Any]:
    """Take the type out of the help of options without a value, which newer versions of Typer show."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def _explained(function: Callable[..., None]) -> Callable[..., None]:
    """Let the errors of a command end it with one sentence, and with a JSON document where one is due."""

    @functools.wraps(function)
    def command(**options: Any) -> None:
        try:
            function(**options)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (GpufleetError, OSError) as error:
            if options.get("as_json"):
                with contextlib.suppress(OSError):  # where the error is that nothing can be printed
                    print_json({"error": type(error).__name__, "message": str(error)})
            print_error(error)
            raise typer.Exit(1) from None

    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        from gpufleet import __version__

        sys.stdout.write(f"gpufleet {__version__}\n")
        raise typer.Exit


_app = typer.Typer(
    cls=LazyCommands, context_settings=HELP, add_completion=False, pretty_exceptions_enable=False
)


@_app.callback()
def _gpufleet(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """CUDA contexts that migrate between threads, over real GPUs or virtual ones."""
