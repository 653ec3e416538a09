"""Standalone tests under xdist: each in a child of the worker that got it, a file on one worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# How long the children sleep that must not be left: told by it from any other process.
TAG = str(5_000_000 + os.getpid())


def test_deaths_take_no_worker_along(
    pytester: pytest.Pytester, neighbours: Callable[..., Path]
) -> None:
    neighbours("ctypes.string_at(0)", name="test_a")
    neighbours("os._exit(0)", name="test_b")
    pytester.makepyfile(test_c="def test_here(): pass\ndef test_here_too(): pass")
    result = pytester.runpytest_subprocess("-n", "2", "-v", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=6, failed=2)
    result.stdout.no_fnmatch_line("*worker 'gw*' crashed*")
    result.stdout.fnmatch_lines_random(
        ["*died of SIGSEGV*test_a.py::test_guilty", "*exited with code 0*test_b.py::test_guilty"]
    )
    workers = re.findall(r"\[(gw\d)\].* (test_[ab])\.py::", result.stdout.str())
    assert len({worker for worker, file in workers if file == "test_a"}) == 1
    assert len({worker for worker, file in workers if file == "test_b"}) == 1


@pytest.mark.parametrize("dist", ["worksteal", "loadgroup", "each"])
def test_other_ways_to_distribute_are_right_too(pytester: pytest.Pytester, dist: str) -> None:
    pytester.makepyfile(
        """
        import os
        import pytest
        pytestmark = [pytest.mark.standalone, pytest.mark.xdist_group("gpu@0")]
        @pytest.mark.parametrize("number", range(5))
        def test_it(number):
            if number == 2: os._exit(0)
        """
    )
    result = pytester.runpytest_subprocess("-n", "2", "--dist", dist, "-p", "no:cacheprovider")
    times = 2 if dist == "each" else 1
    result.assert_outcomes(passed=4 * times, failed=1 * times)


def test_a_death_at_import_is_reported_by_the_workers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a="import os, pytest\npytestmark = pytest.mark.standalone\nos._exit(0)\n",
        test_b="def test_fine(): pass",
    )
    result = pytester.runpytest_subprocess("-n", "2", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*exited with code 0, at the import of test_a.py"])
    assert result.ret != 0


def test_a_usage_fault_is_told_once_and_without_a_traceback(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.gpu(cout=1)\ndef test_it(): pass")
    result = pytester.runpytest_subprocess("-n", "2", "-p", "no:cacheprovider")
    assert result.ret != 0
    output = result.stdout.str() + result.stderr.str()
    assert "unknown argument 'cout'" in output
    assert "Traceback" not in output


def test_interrupting_the_controller_leaves_no_process(
    pytester: pytest.Pytester,
    neighbours: Callable[..., Path],
    processes_left: Callable[[str], list[int]],
) -> None:
    file = neighbours(
        f"subprocess.Popen(['sleep', '{TAG}'])\nopen('running', 'w').close()\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=pytester.path,
    )
    while not (pytester.path / "running").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "KeyboardInterrupt" in output
    assert processes_left(f"sleep {TAG}") == []
    assert processes_left(str(file)) == []
