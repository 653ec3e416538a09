"""What the README and CONTRIBUTING say is so: their code runs, their options and files exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from bcg_core import cli
from bcg_core.cli.commands import application
from bcg_core.models import tiny

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")}
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_OPTION = re.compile(r"--[a-z][\w-]+")


def _blocks(language: str) -> list[str]:
    return [body for found, body in _FENCED.findall(PAGES["README.md"]) if found == language]


SCRIPTS = [block for block in _blocks("python") if "\ndef test_" not in block]
TEST_FILES = [block for block in _blocks("python") if "\ndef test_" in block]


def test_the_readme_has_code_of_each_kind() -> None:
    assert SCRIPTS
    assert TEST_FILES
    assert _blocks("bash")


@pytest.mark.parametrize("block", SCRIPTS, ids=[block.splitlines()[-1] for block in SCRIPTS])
def test_a_block_runs_and_prints_what_its_comments_say(
    block: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {"__name__": "readme"}
    if "pipe = ..." in block:
        # Two steps instead of the pipeline's fifty: only the picture is smaller work.
        made = tiny.tiny_pipeline()
        made.set_progress_bar_config(disable=True)
        names["tiny_pipeline"] = made
        block = block.replace("pipe = ...", "pipe = tiny_pipeline").replace(
            'pipe("a lighthouse"', 'pipe("a lighthouse", 64, 64, 2'
        )
    exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    said = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
    assert len(printed) == len(said)
    for line, words in zip(printed, said):
        if words.endswith("…"):
            # The names of what is there, in order; their values differ.
            assert all(word.split()[0] in line for word in words.rstrip(", …").split(", "))
        else:
            assert line == words


@pytest.mark.parametrize("block", TEST_FILES)
def test_the_test_file_passes_without_registry_and_configuration(
    block: str, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(block)
    result = pytester.runpytest("--strict-markers")
    outcomes = result.parseoutcomes()
    # What a library warns of on import depends on what this process imported before.
    assert outcomes.keys() <= {"passed", "skipped", "warnings"}
    assert outcomes["passed"] >= 2


def test_the_picture_command_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # load() sets it for the process; the test's own process gets it back as it was.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (command,) = re.findall(r"bcg (generate .*)", "".join(_blocks("bash")))
    (shown,) = _blocks("text")
    assert cli.main([*command.split(), "--device", "cpu"]) == 0

    def alike(text: str) -> str:
        return re.sub(r"\d+\.\d+", "N", text)

    assert alike(capsys.readouterr().out) == alike(shown)
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def _commands(program: str) -> list[str]:
    """What follows ``program`` in the pages' code, up to where the command ends."""
    code = [span for text in PAGES.values() for span in re.findall(r"`([^`\n]+)`", text)]
    code += [part for block in _blocks("bash") for part in re.split(r"&&|\n", block)]
    words = [each.strip() for each in code]
    return [each for each in words if re.match(rf"{program}\b(?!-)", each)]


@cache
def _bcg_options() -> dict[str, set[str]]:
    import typer

    top = typer.main.get_command(application)
    context = top.make_context("bcg", ["generate"])
    known: dict[str, set[str]] = {}
    for name in top.list_commands(context):  # type: ignore[attr-defined]
        command = top.get_command(context, name)  # type: ignore[attr-defined]
        known[name] = {option for each in command.params for option in each.opts}
        for inner, below in getattr(command, "commands", {}).items():
            known[f"{name} {inner}"] = {option for each in below.params for option in each.opts}
    return known


def test_every_bcg_command_and_option_that_is_named_exists() -> None:
    commands = _commands("bcg")
    assert commands
    for line in commands:
        words = [word for word in line.split()[1:3] if re.fullmatch("[a-z]+", word)]
        assert " ".join(words) in _bcg_options(), line
        assert set(_OPTION.findall(line)) <= _bcg_options()[" ".join(words)], line


def test_every_option_that_is_named_exists(pytestconfig: pytest.Config) -> None:
    known = {option for options in _bcg_options().values() for option in options}
    known |= set(_OPTION.findall("".join(f.read_text() for f in ROOT.glob("benchmarks/*.py"))))
    for group in pytestconfig._parser._groups:
        known |= {name for option in group.options for name in option.names()}
    named = {option for text in PAGES.values() for option in _OPTION.findall(text)}
    assert named <= known


def _paths(text: str) -> set[str]:
    """What a page gives as a path: a link's target, or code that ends like a file or a folder."""
    links = {target for target in re.findall(r"\]\(([^)]+)\)", text) if ":" not in target}
    code = {word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()}
    files = {word for word in code if re.fullmatch(r"[\w./]+(\.(py|md|yaml|json|png)|/)", word)}
    ours = {word for word in code if re.fullmatch(r"\.ci/\w+", word)}
    return links | files | ours


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page: str) -> None:
    named = _paths(PAGES[page])
    assert named
    missing = {name for name in named if not (ROOT / name).exists()}
    # The engine's parts are named relative to it, or beside another one of their folder.
    assert not {name for name in missing if not any(ROOT.glob(f"bcg_core/**/{name}"))}
