"""Suites by name: the registry, the selection with ``--bcg-suite``, and ``bcg suites``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pytest_bcg import registry
from pytest_bcg.suites_command import app

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def repository(pytester: pytest.Pytester) -> Path:
    """A repository with two suites in its registry and a test file that is in neither."""
    pytester.mkdir("suites").joinpath("registry.yaml").write_text(
        "suites:\n"
        "  fast:\n"
        "    files: ['tests/fast']\n"
        "  gpu:\n"
        "    files:\n"
        "      - tests/gpu/test_*.py\n"
        "    runner: 1-gpu-h100\n"
        "    est_time: 300\n"
        "    standalone: true\n"
    )
    test = "import os\ndef test_it(): print('pid', os.getpid())\n"
    for file in ("fast/test_a.py", "fast/deep/test_b.py", "gpu/test_c.py", "test_d.py"):
        path = pytester.path / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(test)
    (pytester.path / "tests" / "gpu" / "test_marked.py").write_text(
        "import pytest\npytestmark = [pytest.mark.bcg, pytest.mark.standalone]\n" + test
    )
    return pytester.path


def _passed(result: pytest.RunResult) -> set[str]:
    return {
        line.split("/")[-1].partition("::")[0]
        for line in result.outlines
        if line.startswith("PASSED")
    }


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["--bcg-suite=fast"], {"test_a.py", "test_b.py"}),
        (["--bcg-suite", "gpu"], {"test_c.py", "test_marked.py"}),
        (
            ["--bcg-suite=fast", "--bcg-suite=gpu"],
            {"test_a.py", "test_b.py", "test_c.py", "test_marked.py"},
        ),
        (["--bcg-suite=fast", "tests/fast/deep", "tests/test_d.py"], {"test_b.py"}),
        (["--bcg-suite=gpu", "-k", "marked"], {"test_marked.py"}),
        (["--bcg-suite=gpu", "-m", "standalone"], {"test_c.py", "test_marked.py"}),
        ([], {"test_a.py", "test_b.py", "test_c.py", "test_d.py", "test_marked.py"}),
    ],
)
def test_a_suite_is_run_by_name(
    pytester: pytest.Pytester, arguments: list[str], files: set[str]
) -> None:
    result = pytester.runpytest("-rA", "--import-mode=importlib", *arguments)
    assert _passed(result) == files
    assert result.ret == 0


@pytest.mark.usefixtures("repository")
def test_a_standalone_suite_is_isolated_whether_its_files_say_so_or_not(
    pytester: pytest.Pytester,
) -> None:
    result = pytester.runpytest("-rA", "--bcg-suite=gpu")
    pids = {line for line in result.outlines if line.startswith("pid ")}
    assert len(pids) == 2


@pytest.mark.usefixtures("repository")
def test_a_suite_runs_under_xdist(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(
        "-rA", "-n2", "--import-mode=importlib", "--bcg-suite=gpu"
    )
    assert _passed(result) == {"test_c.py", "test_marked.py"}


@pytest.mark.usefixtures("repository")
def test_an_unknown_suite_lists_what_there_is(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--bcg-suite=fats")
    assert result.ret == pytest.ExitCode.USAGE_ERROR == 4
    result.stderr.fnmatch_lines(
        [
            "ERROR: --bcg-suite: no suite 'fats' in *registry.yaml. Did you mean fast? "
            "Suites: fast, gpu"
        ]
    )


def test_a_suite_without_a_registry_says_where_it_was_sought(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--bcg-suite=fast")
    assert result.ret == 4
    result.stderr.fnmatch_lines(
        ["*cannot read the registry of suites *suites/registry.yaml: No such file or directory"]
    )


def test_the_registry_may_lie_elsewhere(pytester: pytest.Pytester, repository: Path) -> None:
    (repository / "suites" / "registry.yaml").rename(repository / "elsewhere.yaml")
    by_option = pytester.runpytest("-rA", "--bcg-suite=gpu", "--bcg-registry=elsewhere.yaml")
    assert _passed(by_option) == {"test_c.py", "test_marked.py"}
    pytester.makeini("[pytest]\nbcg_registry = elsewhere.yaml")
    by_ini = pytester.runpytest("-rA", "--bcg-suite=gpu")
    assert _passed(by_ini) == {"test_c.py", "test_marked.py"}


def test_a_suite_whose_files_are_missing_is_a_usage_fault(
    pytester: pytest.Pytester, repository: Path
) -> None:
    (repository / "suites" / "registry.yaml").write_text("suites: {s: {files: [no/test_*.py]}}")
    result = pytester.runpytest("--bcg-suite=s")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*suite s: no test file matches 'no/test_[*].py' beneath *"])


def test_a_foreign_or_faulty_registry_disturbs_no_other_run(
    pytester: pytest.Pytester, repository: Path
) -> None:
    (repository / "suites" / "registry.yaml").write_text("- something else")
    pytester.runpytest("tests/fast", "--import-mode=importlib").assert_outcomes(passed=2)


FAULTY = {
    "": "1: the registry is empty; it needs a mapping 'suites'",
    "- a": "1: the registry must be a mapping",
    "suits: {}": "1: the registry: unknown key 'suits'; known keys: suites",
    "{}": "1: the key 'suites' is missing; known keys: suites",
    "suites: 3": "1: 'suites' must be a mapping",
    "suites:\n  a: [b": "2: not valid YAML: expected ',' or ']'",
    "suites:\n  a: 3": "2: suite a must be a mapping",
    "suites:\n  a:\n    runner: x": "3: suite a: 'files' is missing: give a list of files or globs",
    "suites:\n  a:\n    files: x": "3: suite a: files must be a list of at least one file or glob",
    "suites:\n  a:\n    files: []": "3: suite a: files must be a list",
    "suites:\n  a:\n    files:\n    - b\n    - 3": "5: suite a: an entry of files must be text",
    "suites:\n  a:\n    files: [/etc]": "3: suite a: '/etc' must be relative to the root, ",
    "suites:\n  a:\n    files: [../b]": "3: suite a: '../b' must be relative to the root, ",
    "suites:\n  a:\n    files: [b]\n    runer: c": "4: suite a: unknown key 'runer'; known keys: "
    "files, runner, est_time, standalone",
    "suites:\n  a:\n    files: [b]\n    runner: 3": "4: suite a: runner must be text",
    "suites:\n  a:\n    files: [b]\n    runner: ''": "4: suite a: runner must be text",
    "suites:\n  a:\n    files: [b]\n    est_time: -1": "4: suite a: est_time must be a number of",
    "suites:\n  a:\n    files: [b]\n    est_time: .inf": "4: suite a: est_time must be a number",
    "suites:\n  a:\n    files: [b]\n    est_time: true": "4: suite a: est_time must be a number",
    "suites:\n  a:\n    files: [b]\n    standalone: 1": "4: suite a: standalone must be true or ",
    "suites:\n  a:\n    files: [b]\n  a:\n    files: [c]": "4: 'suites': 'a' appears twice",
    "suites:\n  3:\n    files: [b]": "2: a name in 'suites' must be text",
}


@pytest.mark.parametrize(("text", "message"), FAULTY.items())
def test_a_faulty_registry_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(text)
    with pytest.raises(registry.RegistryError) as caught:
        registry.load(path, tmp_path)
    assert str(caught.value).startswith(f"{path}:{message}")


def test_what_is_too_deep_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "registry.yaml"
    file.write_text("[" * 5000)
    with pytest.raises(registry.RegistryError, match="not valid YAML: maximum recursion"):
        registry.load(file, tmp_path)


@pytest.mark.parametrize("pattern", [".", "**x"])
def test_a_pattern_that_is_no_glob_is_refused(tmp_path: Path, pattern: str) -> None:
    file = tmp_path / "registry.yaml"
    file.write_text(f"suites: {{a: {{files: ['{pattern}']}}}}")
    loaded = registry.load(file, tmp_path)
    # Newer Pythons take it for a glob, which matches nothing here.
    with pytest.raises(registry.RegistryError, match=r"suite a: .*(is no glob|no test file)"):
        loaded.files(loaded.suite("a"))


def test_a_tag_constructs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "registry.yaml"
    path.write_text(
        f"suites: {{a: {{files: [b], runner: !!python/object/apply:os.mkdir ['{tmp_path}/x']}}}}"
    )
    with pytest.raises(registry.RegistryError, match="suite a: runner must be text"):
        registry.load(path, tmp_path)
    assert not (tmp_path / "x").exists()


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "registry.yaml"
    path.write_bytes(b"suites: \xff")
    with pytest.raises(registry.RegistryError, match="cannot read the registry"):
        registry.load(path, tmp_path)


def test_the_matrix_is_the_registrys_data() -> None:
    result = CliRunner().invoke(app, ["matrix", "--registry", str(_registry())])
    assert result.exit_code == 0, result.output
    entries = {entry["suite"]: entry for entry in json.loads(result.stdout)["include"]}
    assert entries["bcg-diffusion"] == {
        "suite": "bcg-diffusion",
        "runner": "1-gpu-h100",
        "standalone": True,
        "est_time": 300,
    }
    assert {"bcg-unit", "bcg-plugin"} <= entries.keys()


def test_the_matrix_of_one_runner() -> None:
    arguments = ["matrix", "--registry", str(_registry()), "--runner", "1-gpu-h100"]
    entries = json.loads(CliRunner().invoke(app, arguments).stdout)["include"]
    assert [entry["suite"] for entry in entries] == ["bcg-diffusion"]
    arguments[-1] = "9-gpu"
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "no suite runs on '9-gpu'; runners: 1-gpu-h100, ubuntu-latest" in refused.output


def test_the_list_for_people() -> None:
    result = CliRunner().invoke(app, ["list", "--registry", str(_registry())])
    assert "bcg-diffusion: 1-gpu-h100, standalone, about 300 s" in result.output.splitlines()
    assert "  suites/standalone/test_*.py" in result.output.splitlines()


def test_the_commands_tell_of_a_faulty_registry_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["matrix", "--registry", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert result.output.startswith("error: cannot read the registry of suites")
    assert len(result.output.splitlines()) == 1


def test_marker_and_suite_select_the_same_tests() -> None:
    """In this repository: ``-m "bcg and standalone"`` is the suite ``bcg-diffusion``."""

    def selected(*arguments: str) -> list[str]:
        result = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "--collect-only", "-q"),
                *("-p", "no:cacheprovider", "--bcg-isolate=none", *arguments),
            ],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        return [line for line in result.stdout.splitlines() if line.startswith("suites/")]

    # A file that could be selected by the marker has its word in it.
    candidates = [
        str(file)
        for file in sorted((REPOSITORY / "suites").rglob("test_*.py"))
        if "standalone" in file.read_text(encoding="utf-8")
    ]
    by_suite = selected("--bcg-suite", "bcg-diffusion")
    by_marker = selected("-m", "bcg and standalone", *candidates)
    assert by_suite == by_marker != []


def _registry() -> Path:
    return REPOSITORY / "suites" / "registry.yaml"
