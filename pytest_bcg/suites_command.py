"""``bcg suites``: what the registry says, for people (``list``) and for CI (``matrix``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pytest_bcg import registry
from pytest_bcg.options import DEFAULT_REGISTRY

_USAGE = 2

app = typer.Typer(help="The suites of the registry.", no_args_is_help=True, add_completion=False)

RegistryOption = Annotated[
    Path, typer.Option("--registry", metavar="PATH", help="The registry to read.")
]
RunnerOption = Annotated[
    str | None, typer.Option("--runner", metavar="LABEL", help="Only suites of this runner.")
]


@app.command("matrix")
def matrix(
    registry_path: RegistryOption = Path(DEFAULT_REGISTRY), runner: RunnerOption = None
) -> None:
    """Print a GitHub Actions matrix as JSON, for fromJSON: one entry for each suite."""
    entries = [_entry(suite) for suite in _suites(registry_path, runner)]
    typer.echo(json.dumps({"include": entries}))


@app.command("list")
def list_suites(
    registry_path: RegistryOption = Path(DEFAULT_REGISTRY), runner: RunnerOption = None
) -> None:
    """Print each suite with its runner, its time and its files."""
    for suite in _suites(registry_path, runner):
        facts = [suite.runner]
        if suite.standalone:
            facts.append("standalone")
        if suite.est_time is not None:
            facts.append(f"about {suite.est_time:g} s")
        typer.echo(f"{suite.name}: {', '.join(facts)}")
        for pattern in suite.patterns:
            typer.echo(f"  {pattern}")


def _suites(path: Path, runner: str | None) -> list[registry.Suite]:
    try:
        suites = list(registry.load(path, Path.cwd()).suites.values())
    except registry.RegistryError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_USAGE) from None
    chosen = [suite for suite in suites if runner is None or suite.runner == runner]
    if not chosen:
        known = ", ".join(sorted({suite.runner for suite in suites})) or "none"
        typer.echo(f"error: no suite runs on {runner!r}; runners: {known}", err=True)
        raise typer.Exit(_USAGE)
    return chosen


def _entry(suite: registry.Suite) -> dict[str, Any]:
    return {
        "suite": suite.name,
        "runner": suite.runner,
        "standalone": suite.standalone,
        "est_time": suite.est_time,
    }
