"""Ways to take a process down: each fails the test that was running, by name, and no other."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAYS_TO_DIE = {
    "segfault": ("print('the end is near'); ctypes.string_at(0)", "died of SIGSEGV"),
    "abort": ("os.abort()", "died of SIGABRT"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "died of SIGKILL"),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM)", "died of SIGTERM"),
    "realtime signal": ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", "died of signal 37"),
    "exit 0": ("os._exit(0)", "exited with code 0"),
    "exit 3": ("os._exit(3)", "exited with code 3"),
    "exit in a thread": (
        "thread = threading.Thread(target=os._exit, args=(5,)); thread.start(); time.sleep(30)",
        "exited with code 5",
    ),
    "result pipe closed": (
        "os.closerange(3, 256); time.sleep(60)",
        "lost its result pipe, so it was killed",
    ),
    "everything closed, then an exit": ("os.closerange(0, 256); os._exit(0)", "exited with code 0"),
    "unprintable last words": (
        "os.write(1, b'\\xff\\xfe half a character \\xe2\\x82'); ctypes.string_at(0)",
        "died of SIGSEGV",
    ),
}
if sys.version_info < (3, 12):  # later Pythons raise RecursionError there, too
    WAYS_TO_DIE["endless recursion in C"] = (
        "sys.setrecursionlimit(10**9); import functools\n"
        "def deeper(): return functools.reduce(lambda a, b: deeper(), [0, 0])\n"
        "threading.stack_size(65536 * 4); deeper()",
        "died of SIGSEGV",
    )


@pytest.mark.parametrize(("body", "how"), WAYS_TO_DIE.values(), ids=WAYS_TO_DIE.keys())
def test_a_death_fails_the_running_test_alone(
    pytester: pytest.Pytester, neighbours: Callable[..., Path], body: str, how: str
) -> None:
    neighbours(body)
    result = pytester.runpytest("-rA")
    result.assert_outcomes(passed=2, failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            f"the standalone process {how}, in the call of test_it.py::test_guilty",
            "PASSED test_it.py::test_first",
            "PASSED test_it.py::test_last",
            "FAILED test_it.py::test_guilty - Failed: the standalone process*",
        ]
    )


def test_the_output_and_the_stack_of_a_dead_test_are_shown(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours(
        "print('on stdout'); print('on stderr', file=sys.stderr); os.system('echo from below')\n"
        "ctypes.string_at(0)"
    )
    result = pytester.runpytest()
    result.stdout.fnmatch_lines(
        [
            "*Captured stdout call*",
            "on stdout",
            "from below",
            "*Captured stderr call*",
            "on stderr",
            "Fatal Python error: Segmentation fault",
            '*test_it.py", line * in test_guilty',
        ]
    )
    result.stdout.no_fnmatch_line("*first is fine*")


def test_undecodable_output_is_shown_with_replacements(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("os.write(1, b'caf\\xe9 au lait'); assert False")
    result = pytester.runpytest()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["caf\N{REPLACEMENT CHARACTER} au lait"])


@pytest.mark.parametrize(
    ("fixture", "phase", "outcomes"),
    [
        ("ctypes.string_at(0); yield", "setup", {"passed": 2, "errors": 1}),
        ("yield; ctypes.string_at(0)", "teardown", {"passed": 3, "errors": 1}),
    ],
    ids=["setup", "teardown"],
)
def test_a_death_in_a_fixture_is_an_error_of_that_phase(
    pytester: pytest.Pytester,
    neighbours: Callable[..., Path],
    fixture: str,
    phase: str,
    outcomes: dict[str, int],
) -> None:
    neighbours(
        "pass",
        before=f"@pytest.fixture\ndef deadly():\n    {fixture}\n",
        decorators="@pytest.mark.usefixtures('deadly')",
    )
    result = pytester.runpytest()
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([f"*died of SIGSEGV, in the {phase} of test_it.py::test_guilty"])


def test_a_death_at_import_is_an_error_of_that_file_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_deadly="""
            import ctypes, sys
            import pytest
            pytestmark = [pytest.mark.standalone]
            print("importing", file=sys.stderr)
            ctypes.string_at(0)
            def test_never(): pass
        """,
        test_fine="def test_fine(): pass",
    )
    result = pytester.runpytest("--continue-on-collection-errors")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*died of SIGSEGV*", "importing", "*", "ERROR test_deadly.py*"])


def test_an_ordinary_import_error_is_reported_as_ever(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\npytestmark = pytest.mark.standalone\nimport no_such_thing")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*No module named 'no_such_thing'"])


def test_a_file_that_dies_at_its_second_import_fails_each_of_its_tests(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import ctypes, os, pathlib
        import pytest
        seen = pathlib.Path(__file__).with_suffix(".seen")
        standalone = pytest.mark.standalone
        if os.environ.get("PYTEST_BCG_PROCESS"):
            seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
            ctypes.string_at(0)
        @standalone
        def test_one(): pass
        def test_here(): pass
        @standalone
        def test_two(): pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(["*died of SIGSEGV*while it imported the file*::test_two"])
    [seen] = pytester.path.glob("*.seen")
    assert seen.read_text() == "x", "a process that cannot start is not started for each test"


@pytest.mark.parametrize(
    ("at_exit", "how"),
    [
        ("atexit.register(ctypes.string_at, 0)", "died of SIGSEGV"),
        ("atexit.register(os._exit, 9)", "exited with code 9"),
    ],
)
def test_a_death_at_exit_is_laid_to_the_last_test(
    pytester: pytest.Pytester, neighbours: Callable[..., Path], at_exit: str, how: str
) -> None:
    neighbours(at_exit)
    result = pytester.runpytest()
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines([f"*{how}, after its last test test_it.py::test_last"])


def test_an_exit_that_never_comes_is_laid_to_the_last_test(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    pytester.makeini("[pytest]\nbcg_exit_timeout = 0.5")
    neighbours("threading.Thread(target=time.sleep, args=(60,)).start()")
    result = pytester.runpytest()
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*had not exited within 0.5 s (bcg_exit_timeout)*test_last"])


def test_a_session_that_breaks_down_at_its_end_is_laid_to_the_last_test(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    pytester.makeconftest(
        "import os\n"
        "def pytest_sessionfinish():\n"
        "    assert 'PYTEST_BCG_PROCESS' not in os.environ, 'broken hook'\n"
    )
    neighbours("pass")
    result = pytester.runpytest("-rA")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(
        ["*exited with code 1, after its last test *::test_last", "*broken hook*"]
    )


HANGS = {
    "ignoring SIGTERM": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])\n"
        "print('hanging'); time.sleep(60)"
    ),
    "in C, holding the interpreter lock": (
        "mutex = ctypes.create_string_buffer(128); lock = ctypes.PyDLL(None).pthread_mutex_lock\n"
        "print('hanging'); lock(mutex); lock(mutex)"
    ),
    "printing without end": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "print('hanging')\nwhile True: os.write(1, b'x' * 4096 + b'\\n')"
    ),
}


@pytest.mark.parametrize("body", HANGS.values(), ids=HANGS.keys())
def test_a_hang_that_the_process_cannot_end_is_ended_from_outside(
    pytester: pytest.Pytester, neighbours: Callable[..., Path], body: str
) -> None:
    pytester.makeini("[pytest]\nbcg_timeout_grace = 0.3")
    neighbours(body, decorators="@pytest.mark.timeout(0.7)")
    result = pytester.runpytest()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*was killed: it had not ended within its time-out of 0.7 s and 0.3 s of grace, "
            "in the call of test_it.py::test_guilty",
            '*test_it.py", line * in test_guilty',
        ]
    )
    assert len(result.stdout.str()) < 2_000_000, "endless output is kept bounded"


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_pytest_timeout_works_inside(
    pytester: pytest.Pytester, neighbours: Callable[..., Path], method: str
) -> None:
    neighbours("time.sleep(30)", decorators=f"@pytest.mark.timeout(0.5, method='{method}')")
    result = pytester.runpytest()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*Timeout*"])
    result.stdout.no_fnmatch_line("*was killed*")


def test_the_limit_of_the_call_alone_leaves_fixtures_their_time(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    pytester.makeini("[pytest]\nbcg_timeout_grace = 0.1")
    neighbours(
        "pass",
        before="@pytest.fixture\ndef slow(): time.sleep(0.8)\n",
        decorators="@pytest.mark.usefixtures('slow')\n@pytest.mark.timeout(0.3, func_only=True)",
    )
    pytester.runpytest().assert_outcomes(passed=3)


def test_the_time_out_of_the_command_line_holds_outside_too(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    pytester.makeini("[pytest]\nbcg_timeout_grace = 0.5")
    neighbours("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(60)")
    result = pytester.runpytest("--timeout=1.5")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*its time-out of 1.5 s and 0.5 s of grace*"])


def test_a_file_that_hangs_at_import_is_ended(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nbcg_start_timeout = 0.8")
    pytester.makepyfile(
        "import time, pytest\npytestmark = pytest.mark.standalone\ntime.sleep(60)\n"
        "def test_never(): pass"
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*had not ended within 0.8 s (bcg_start_timeout)*"])


CHILDREN = {
    "a child": "subprocess.Popen(['sleep', '{tag}'])",
    "a child in a session of its own": (
        "subprocess.Popen(['sleep', '{tag}'], start_new_session=True)"
    ),
    "a daemon": "os.system('setsid sh -c \"sleep {tag} &\" >/dev/null 2>&1 </dev/null')",
    "a fork that holds every descriptor": "os.fork() or os.execlp('sh', 'sh', '-c', 'sleep {tag}')",
}


@pytest.mark.parametrize("ending", ["", "; ctypes.string_at(0)"], ids=["passes", "crashes"])
@pytest.mark.parametrize("child", CHILDREN.values(), ids=CHILDREN.keys())
def test_no_process_is_left_behind(
    pytester: pytest.Pytester,
    neighbours: Callable[..., Path],
    processes_left: Callable[[str], list[int]],
    child: str,
    ending: str,
) -> None:
    tag = str(3_000_000 + abs(hash(pytester.path)) % 1_000_000)
    neighbours(child.format(tag=tag) + ending)
    result = pytester.runpytest()
    result.assert_outcomes(passed=2 if ending else 3, failed=1 if ending else 0)
    assert processes_left(tag) == []


def test_a_fork_that_goes_on_with_the_session_reports_nothing(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("os.fork(); time.sleep(0.1)")
    pytester.runpytest().assert_outcomes(passed=3)


def test_an_expected_failure_may_be_a_death(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("ctypes.string_at(0)", decorators="@pytest.mark.xfail(reason='crashes')")
    pytester.runpytest().assert_outcomes(passed=2, xfailed=1)
    pytester.runpytest("--runxfail").assert_outcomes(passed=2, failed=1)


def test_an_xfail_that_names_exceptions_does_not_excuse_a_death(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("ctypes.string_at(0)", decorators="@pytest.mark.xfail(raises=ValueError)")
    pytester.runpytest().assert_outcomes(passed=2, failed=1)
