"""A standalone test is like any other to pytest's options, reports and fixtures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# How long the children sleep that must not be left: told by it from any other process.
TAG = str(4_000_000 + os.getpid())


@pytest.fixture
def two_files(pytester: pytest.Pytester) -> None:
    """Two standalone files and an ordinary one, whose tests print their process."""
    test = """
        import os
        def test_one(): print("pid", __name__, os.getpid())
        def test_two(): print("pid", __name__, os.getpid())
    """
    mark = "\n        import pytest\n        pytestmark = pytest.mark.standalone"
    pytester.makepyfile(test_a=mark + test, test_b=mark + test, test_c=test)


def _pids(output: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for module, pid in re.findall(r"^pid (\w+) (\d+)", output, re.MULTILINE):
        found.setdefault(module, set()).add(int(pid))
    return found


@pytest.mark.usefixtures("two_files")
def test_each_file_has_one_fresh_process(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("-rA")
    result.assert_outcomes(passed=6)
    pids = _pids(result.stdout.str())
    assert {name: len(each) for name, each in pids.items()} == {
        "test_a": 1,
        "test_b": 1,
        "test_c": 1,
    }
    assert pids["test_c"] == {os.getpid()}
    assert len(pids["test_a"] | pids["test_b"] | pids["test_c"]) == 3


@pytest.mark.usefixtures("two_files")
def test_isolation_can_be_turned_off_and_says_so(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("-rA", "--bcg-isolate=none")
    result.assert_outcomes(passed=6)
    assert set.union(*_pids(result.stdout.str()).values()) == {os.getpid()}
    result.stdout.fnmatch_lines(
        ["bcg: isolation is off (--bcg-isolate=none): 4 standalone test(s) run in this process"]
    )


@pytest.mark.usefixtures("two_files")
@pytest.mark.parametrize("option", ["--pdb", "--setup-show"])
def test_what_needs_this_process_turns_isolation_off(
    pytester: pytest.Pytester, option: str
) -> None:
    result = pytester.runpytest(option, "-q")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines([f"bcg: isolation is off ({option}): 4 standalone*"])


def test_a_single_test_can_be_marked(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        import pytest
        def test_here(): print("pid here", os.getpid())
        @pytest.mark.standalone
        def test_there(): print("pid there", os.getpid())
        def test_here_again(): print("pid here", os.getpid())
        """
    )
    result = pytester.runpytest("-rA")
    result.assert_outcomes(passed=3)
    pids = _pids(result.stdout.str())
    assert pids["here"] == {os.getpid()}
    assert pids["there"] != pids["here"]


def test_outcomes_and_fixtures_inside(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest
        @pytest.fixture(scope="session")
        def shared(): return []
        @pytest.fixture(scope="module", params=["x", "y"])
        def each(request): return request.param
        """
    )
    pytester.makepyfile(
        """
        import subprocess, sys, unittest, logging
        import pytest
        pytestmark = pytest.mark.standalone
        def test_capsys(capsys):
            print("seen")
            assert capsys.readouterr().out == "seen\\n"
        def test_capfd(capfd):
            subprocess.run(["echo", "below"], check=True)
            assert capfd.readouterr().out == "below\\n"
        def test_tmp_path(tmp_path):
            (tmp_path / "file").write_text("x")
        def test_shared(shared): shared.append(1)
        def test_shared_again(shared): assert shared == [1]
        @pytest.mark.parametrize("value", [object(), lambda: 1, "a/b::c[d]"])
        def test_parameters(value): pass
        def test_each(each): pass
        def test_skipped(): pytest.skip("not today")
        @pytest.mark.skip(reason="never")
        def test_skip_marked(): assert False
        @pytest.mark.xfail(reason="known")
        def test_xfailed(): assert False
        @pytest.mark.xfail
        def test_xpassed(): pass
        @pytest.mark.xfail(strict=True)
        def test_strict(): pass
        class TestInClass:
            def test_method(self): pass
        class TestUnit(unittest.TestCase):
            def test_unit(self): self.assertEqual(1, 1)
        def test_exits(): sys.exit(4)
        def test_logs(caplog):
            logging.getLogger("x").warning("careful")
            assert False
        """
    )
    result = pytester.runpytest("-ra")
    result.assert_outcomes(passed=12, skipped=2, xfailed=1, xpassed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            "*Captured log call*",
            "WARNING * careful",
            "SKIPPED ?1? test_outcomes_and_fixtures_inside.py:*: not today",
            "SKIPPED ?1? test_outcomes_and_fixtures_inside.py:*: never",
            "XFAIL test_outcomes_and_fixtures_inside.py::test_xfailed - known",
            "FAILED test_outcomes_and_fixtures_inside.py::test_exits - SystemExit: 4",
        ]
    )


def test_output_belongs_to_its_phase(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        import pytest
        @pytest.fixture
        def talks():
            print("from set-up")
            yield
            print("from tear-down")
        @pytest.mark.standalone
        def test_it(talks):
            print("from the call")
            os.write(2, b"straight to the descriptor\\n")
            assert False
        """
    )
    result = pytester.runpytest()
    result.stdout.fnmatch_lines(
        [
            "*Captured stdout setup*",
            "from set-up",
            "*Captured stdout call*",
            "from the call",
            "*Captured stderr call*",
            "straight to the descriptor",
            "*Captured stdout teardown*",
            "from tear-down",
        ]
    )


def test_long_output_is_cut_at_its_start(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.standalone
        def test_it():
            print("the beginning")
            print("x" * 3_000_000)
            print("the end")
            assert False
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["?the first * bytes were left out?", "the end"])
    result.stdout.no_fnmatch_line("the beginning")
    assert len(result.stdout.str()) < 400_000


def test_unshown_output_goes_straight_through_with_s(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("print('straight through'); assert False")
    result = pytester.runpytest_subprocess("-s", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*first is fine", "*straight through", "*last is fine"])
    result.stdout.no_fnmatch_line("*Captured stdout*")


def test_selection_by_keyword_and_by_id(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("ctypes.string_at(0)")
    pytester.runpytest("-k", "first or last").assert_outcomes(passed=2, deselected=1)
    pytester.runpytest("test_it.py::test_guilty").assert_outcomes(failed=1)
    pytester.runpytest("-m", "standalone", "-k", "first").assert_outcomes(passed=1, deselected=2)


@pytest.mark.parametrize("option", ["-x", "--maxfail=1"])
def test_stopping_at_the_first_failure(
    pytester: pytest.Pytester, neighbours: Callable[..., Path], option: str
) -> None:
    neighbours("ctypes.string_at(0)")
    result = pytester.runpytest(option)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])


def test_stopping_tears_down_what_the_file_shares(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pathlib
        import pytest
        pytestmark = pytest.mark.standalone
        @pytest.fixture(scope="session")
        def shared():
            yield
            pathlib.Path("torn_down").touch()
            raise ValueError("while tearing down")
        def test_fails(shared): assert False
        def test_never(shared): pass
        """
    )
    result = pytester.runpytest("-x")
    result.assert_outcomes(failed=1, errors=1)
    assert (pytester.path / "torn_down").exists()
    result.stdout.fnmatch_lines(["*ValueError: while tearing down"])


def test_last_failed_runs_the_dead_test_again_and_no_other(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    file = neighbours("ctypes.string_at(0)")
    pytester.runpytest().assert_outcomes(passed=2, failed=1)
    file.write_text(file.read_text().replace("ctypes.string_at(0)", "pass"))
    pytester.runpytest("--lf").assert_outcomes(passed=1)
    pytester.runpytest("--lf").assert_outcomes(passed=3)


def test_junit_xml(pytester: pytest.Pytester, neighbours: Callable[..., Path]) -> None:
    neighbours("request.getfixturevalue('record_property')('key', 'value'); ctypes.string_at(0)")
    path = neighbours(
        "request.getfixturevalue('record_property')('key', 'value')", name="test_other"
    )
    pytester.runpytest("--junitxml=out.xml", "-o", "junit_logging=all").assert_outcomes(
        passed=5, failed=1
    )
    suite = ElementTree.parse(pytester.path / "out.xml").getroot().find("testsuite")
    assert suite is not None
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "1", "errors": "0", "skipped": "0"}
    failure = suite.find("testcase[@name='test_guilty']/failure")
    assert failure is not None
    assert "SIGSEGV" in failure.get("message", "")
    out = suite.find("testcase[@name='test_first']/system-out")
    assert out is not None
    assert "first is fine" in (out.text or "")
    assert suite.find(f"testcase[@classname='{path.stem}']//property[@value='value']") is not None


def test_durations_and_verbose(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import time, pytest\n@pytest.mark.standalone\ndef test_slow(): time.sleep(0.3)"
    )
    result = pytester.runpytest("--durations=1", "-v")
    result.stdout.fnmatch_lines(
        ["*::test_slow PASSED*", "0.3*s call * test_durations_and_verbose.py::test_slow"]
    )


def test_the_last_line_is_pytests_and_zero_counts_are_not_named(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert re.fullmatch(r"=+ 3 passed in .*s =+", result.outlines[-1])
    assert result.errlines == []
    assert not re.search(r"failed|error", result.stdout.str())


def test_warnings_come_through(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import warnings
        import pytest
        class Own(UserWarning):
            def __init__(self, one, two): super().__init__(one + two)
        @pytest.mark.standalone
        def test_it():
            warnings.warn("getting old", DeprecationWarning)
            warnings.warn(Own("made ", "here"))
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, warnings=2)
    result.stdout.fnmatch_lines(
        ["*test_it*", "*DeprecationWarning: getting old", "*Warning: made here"]
    )


def test_warnings_as_failures_hold_inside(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import warnings, pytest\n@pytest.mark.standalone\n"
        "def test_it(): warnings.warn('no', RuntimeWarning)"
    )
    pytester.runpytest("-W", "error::RuntimeWarning").assert_outcomes(failed=1)


def test_a_skipped_test_does_not_end_its_files_process(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.standalone
        @pytest.fixture(scope="module")
        def shared():
            yield []
            print("torn down")
        def test_one(shared): shared.append(1)
        @pytest.mark.skip(reason="not now")
        def test_two(shared): pass
        def test_three(shared): assert shared == [1]
        @pytest.mark.skip(reason="not now")
        def test_four(shared): pass
        """
    )
    result = pytester.runpytest("-rs")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED [[]1[]] test_a_skipped*: not now"])


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest has no subtests before 9")
def test_a_test_fails_with_its_subtests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.standalone
        def test_it(subtests):
            for number in range(3):
                with subtests.test(number=number):
                    assert number == 1
        """
    )
    result = pytester.runpytest("-v")
    result.stdout.fnmatch_lines(["*::test_it FAILED*", "*contains 2 failed subtests*"])
    result.assert_outcomes(failed=3)


@pytest.mark.parametrize("option", ["--fixtures", "--fixtures-per-test"])
def test_fixtures_are_listed(
    pytester: pytest.Pytester, neighbours: Callable[..., Path], option: str
) -> None:
    neighbours("pass", before="@pytest.fixture(autouse=True)\ndef mine(): 'All of it.'")
    result = pytester.runpytest(option)
    assert "ERROR" not in result.stdout.str()
    result.stdout.fnmatch_lines(["mine -- test_it.py:*", "*All of it."])


def test_a_process_starts_where_every_warning_is_an_error(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("pass")
    # As installed: pytest warns of modules that it finds in a distribution's list of files.
    pytester.runpytest_subprocess("-W", "error").assert_outcomes(passed=3)


def test_options_and_plugins_of_the_run_hold_inside(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\npython_functions = check_*")
    pytester.makeconftest(
        "import pytest\n"
        "def pytest_addoption(parser): parser.addoption('--flavour', default='none')\n"
        "@pytest.fixture\ndef flavour(request): return request.config.getoption('--flavour')\n"
    )
    pytester.mkdir("tests").joinpath("test_it.py").write_text(
        "import pytest\n@pytest.mark.standalone\n"
        "def check_it(flavour, pytestconfig):\n"
        "    assert flavour == 'sweet'\n"
        "    assert not pytestconfig.pluginmanager.hasplugin('pastebin')\n"
    )
    result = pytester.runpytest(
        "tests", "--flavour=sweet", "-p", "no:pastebin", "--import-mode=importlib"
    )
    result.assert_outcomes(passed=1)


def test_temporary_folders_of_the_run_are_kept_apart(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        def test_here(tmp_path): (tmp_path / "here").touch()
        @pytest.mark.standalone
        def test_there(tmp_path): (tmp_path / "there").touch()
        """
    )
    pytester.runpytest_subprocess("--basetemp=base").assert_outcomes(passed=2)
    assert len(list((pytester.path / "base").rglob("*here"))) >= 2


def test_ending_the_session_from_inside_ends_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.standalone
        def test_ends(): pytest.exit("enough", returncode=7)
        def test_never(): pass
        """
    )
    result = pytester.runpytest()
    assert result.ret == 7
    result.stdout.fnmatch_lines(["*Exit: enough*"])


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("pytest.exit('enough', returncode=7)", 7, "*Exit: enough*"),
        ("raise KeyboardInterrupt", 2, "*KeyboardInterrupt*"),
        ("request.session.shouldstop = 'enough'", 2, "*Interrupted: enough*"),
        ("request.session.shouldfail = 'enough'", 1, "*! enough !*"),
    ],
)
def test_an_end_that_a_test_asks_for_tears_down_and_runs_no_other(
    pytester: pytest.Pytester, body: str, code: int, line: str
) -> None:
    pytester.makepyfile(
        f"""
        import pathlib, pytest
        pytestmark = pytest.mark.standalone
        @pytest.fixture(scope="module")
        def shared():
            yield
            pathlib.Path("torn_down").touch()
        def test_ends(request, shared):
            {body}
        def test_never(): pathlib.Path("ran").touch()
        """
    )
    result = pytester.runpytest_subprocess()
    assert result.ret == code
    result.stdout.fnmatch_lines([line])
    assert (pytester.path / "torn_down").exists()
    assert not (pytester.path / "ran").exists()


def test_interrupting_kills_the_children(
    pytester: pytest.Pytester,
    neighbours: Callable[..., Path],
    processes_left: Callable[[str], list[int]],
) -> None:
    neighbours(
        f"subprocess.Popen(['sleep', '{TAG}'])\nopen('running', 'w').close()\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=pytester.path,
        start_new_session=True,
    )
    while not (pytester.path / "running").exists() and process.poll() is None:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "KeyboardInterrupt" in output
    assert "1 passed" in output.splitlines()[-1]
    assert processes_left(f"sleep {TAG}") == []
    assert processes_left(str(pytester.path / "test_it.py")) == []


def test_the_child_dies_with_a_killed_parent(
    pytester: pytest.Pytester,
    neighbours: Callable[..., Path],
    processes_left: Callable[[str], list[int]],
) -> None:
    file = neighbours("open('running', 'w').close()\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        stdout=subprocess.DEVNULL,
        cwd=pytester.path,
    )
    while not (pytester.path / "running").exists() and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert processes_left(str(file)) == []


def test_nothing_finished_runs_again_and_nothing_is_lost(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, pathlib
        import pytest
        pytestmark = pytest.mark.standalone
        @pytest.mark.parametrize("number", range(12))
        def test_it(number):
            with open("runs", "a") as file: file.write(f"{number}\\n")
            if number % 4 == 3: os._exit(number)
        """
    )
    pytester.runpytest().assert_outcomes(passed=9, failed=3)
    runs = (pytester.path / "runs").read_text().split()
    assert runs == [str(number) for number in range(12)]


def test_ids_that_look_like_something_else(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.standalone
        @pytest.mark.parametrize("x", ["a::b", "[", "]", "a@b", "", "e\\u0301", "\\ud800", "a\\nb"])
        def test_it(x): pass
        """
    )
    pytester.runpytest().assert_outcomes(passed=8)


def test_neighbours_in_this_process_keep_their_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest
        @pytest.fixture(scope="session")
        def shared():
            print("session set up")
            yield
            print("session torn down")
        """
    )
    for name in ("one/test_a", "one/test_b", "two/test_c"):
        path = pytester.path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        mark = "@pytest.mark.standalone" if name.endswith("b") else ""
        path.write_text(
            "import pytest\n"
            "@pytest.fixture(scope='package')\n"
            "def folder():\n    yield\n    print('folder torn down')\n"
            f"{mark}\ndef test_it(shared, folder): pass\n"
        )
    result = pytester.runpytest("-rA", "--import-mode=importlib")
    result.assert_outcomes(passed=3)
    here = result.stdout.str().replace("\n", " ")
    assert here.count("session set up") == 2, "once in this process, once in the standalone one"
    assert here.count("session torn down") == 2


def test_classes_and_subfolders(pytester: pytest.Pytester) -> None:
    for folder in ("one", "two"):
        pytester.mkpydir(folder).joinpath("test_same.py").write_text(
            "import pytest\n"
            "@pytest.mark.standalone\n"
            "class TestIt:\n"
            "    def test_in_class(self): pass\n"
            "    @pytest.mark.parametrize('x', [1, 2])\n"
            "    def test_more(self, x): pass\n"
        )
    pytester.runpytest().assert_outcomes(passed=6)


def test_the_plugin_does_not_need_pytest_timeout(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("os._exit(1)")
    pytester.runpytest("-p", "no:timeout", "-p", "no:xdist").assert_outcomes(passed=2, failed=1)
