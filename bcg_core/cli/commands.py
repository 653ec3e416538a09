"""The ``bcg`` application: its own commands, and those that other packages add."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bcg_core.cli.generate import generate

GROUP = "bcg.commands"


class Commands(TyperGroup):
    """Adds the entry points of ``bcg.commands``, each loaded only when it is used or listed.

    An entry point names a ``typer.Typer``. One that cannot be loaded stays listed, and fails only
    when it is called.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(added())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in added():
            return own
        return _mounted(cmd_name, added()[cmd_name])


def added() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _mounted(name: str, entry: EntryPoint) -> Any:
    try:
        command = typer.main.get_command(entry.load())
    except Exception as error:
        reason = f"bcg {name} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"

        def broken() -> None:
            raise RuntimeError(reason)

        stand_in = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        stand_in.command(name, help=reason)(broken)
        command = typer.main.get_command(stand_in)
    command.name = name
    return command


def _print_version(asked: bool) -> None:
    if asked:
        print(f"bcg {version('pytest-bcg')}")
        raise typer.Exit


application = typer.Typer(
    cls=Commands,
    name="bcg",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Breakable CUDA graphs for diffusion models.",
)


@application.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    pass


application.command("generate")(generate)
