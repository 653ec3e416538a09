"""Standalone tests in a pytest session: which they are, and the process that runs them now."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_bcg import options
from pytest_bcg.isolation.declared import declares_standalone
from pytest_bcg.isolation.process import Deadline, Process, ProcessDeathError
from pytest_bcg.isolation.run import Run, replay_warning

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_bcg.isolation.transport import Message

# What needs the tests in this very process: an interactive debugger, or pytest's set-up printing.
_NEEDS_THIS_PROCESS = {
    "usepdb": "--pdb",
    "trace": "--trace",
    "setupshow": "--setup-show",
    "setuponly": "--setup-only",
    "setupplan": "--setup-plan",
}


@dataclass(frozen=True)
class _Serving:
    """A process that has collected its file and waits for the next test to run."""

    process: Process
    file: Path
    tests: frozenset[str]
    uncollected: str


class Isolation:
    """Runs standalone tests in the process of their file, one such process at a time.

    Under xdist each worker has one of these: the process is a child of the worker that got the
    test. A process serves its file for as long as the next test is of the same file; then it ends.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._path = [entry or os.getcwd() for entry in sys.path]
        self._serving: _Serving | None = None
        self._unstartable: dict[Path, ProcessDeathError] = {}
        self._started = 0

    @property
    def off_because(self) -> str | None:
        """Why standalone tests run in this process, or ``None`` where they do not."""
        if options.isolation(self._config) == "none":
            return "--bcg-isolate=none"
        for option, name in _NEEDS_THIS_PROCESS.items():
            if self._config.getoption(option, False):
                return name
        return None

    def takes(self, item: pytest.Item) -> bool:
        """Whether the test runs in a process of its own. None is started for a skipped one.

        Where its file's process serves already, that one skips it: it must not end there.
        """
        return (
            self.off_because is None
            and item.get_closest_marker("standalone") is not None
            and (item.get_closest_marker("skip") is None or self._serves(item.path))
        )

    def describe(self, items: Sequence[pytest.Item]) -> str | None:
        """A line for the terminal when standalone tests will not be isolated."""
        reason = self.off_because
        count = sum(item.get_closest_marker("standalone") is not None for item in items)
        if reason is None or not count:
            return None
        return f"bcg: isolation is off ({reason}): {count} standalone test(s) run in this process"

    def collect(self, collector: pytest.Collector) -> pytest.CollectReport | None:
        """Import a standalone file in its own process first; a report if that does not survive it.

        Importing it here, which collecting does, would otherwise take this process along.
        """
        if (
            not isinstance(collector, pytest.Module)
            or self.off_because is not None
            or not declares_standalone(collector.path)
        ):
            return None
        try:
            serving = self._start(collector.path)
        except ProcessDeathError as died:
            message = f"the standalone process {died}, at the import of {collector.nodeid}"
            printed = (died.printed or {}).items()
            sections = [(f"Captured {name}", text) for name, text in printed if text]
            return pytest.CollectReport(collector.nodeid, "failed", message, [], sections)
        if self._serving is None:
            # Most likely the first to be needed: it need not import its file again.
            self._serving = serving
        else:
            serving.process.close()
        return None

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """pytest's run protocol for a standalone test; ``False``, and nothing done, for others."""
        if not self.takes(item):
            return False
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            self._run(item, nextitem)
            self._leave(item, nextitem)
        except BaseException:
            self.close()
            raise
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def close(self) -> None:
        """End the process that serves now, and all that it started."""
        if self._serving is not None:
            self._serving.process.close()
            self._serving = None

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        run = Run(item, options.timeout_grace(self._config))
        death: ProcessDeathError | None = None
        try:
            serving = self._serve(item.path)
            following = nextitem if self._shares_process(item, nextitem) else None
            self._converse(run, serving, following)
        except ProcessDeathError as error:
            death = error
        # Outside of the handler, so that the report does not tell of an exception behind its own.
        if death is not None:
            printed = death.printed
            if printed is None:
                printed = self._serving.process.last_output() if self._serving else {}
            self.close()
            for report in run.death(str(death), printed):
                item.ihook.pytest_runtest_logreport(report=report)

    def _leave(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Tear down here what tests before this one had set up and the next one does not share.

        pytest keeps it for a next test in the same folder or session, as this one may have been.
        """
        call = pytest.CallInfo.from_call(
            lambda: item.session._setupstate.teardown_exact(nextitem),
            when="teardown",
            reraise=(pytest.exit.Exception, KeyboardInterrupt),
        )
        if call.excinfo is not None:
            report = pytest.TestReport.from_item_and_call(item, call)
            item.ihook.pytest_runtest_logreport(report=report)

    def _converse(self, run: Run, serving: _Serving, following: pytest.Item | None) -> None:
        item, process = run.item, serving.process
        test = _own_id(item)
        if test not in serving.tests:
            why = serving.uncollected or "it was collected here, and not there"
            raise ProcessDeathError(f"did not find {test}: {why}")
        run.begin()
        process.send(
            {
                "do": "run",
                "test": test,
                "next": None if following is None else _own_id(following),
                "failures_left": self._failures_left(item.session),
            }
        )
        held: pytest.TestReport | None = None
        while (message := process.receive(run.deadline))["event"] != "done":
            if message["event"] == "report":
                report = run.report(message["report"], process.output())
                if report.when == "teardown" and self._is_last(item.session, following):
                    held = report  # it is not known to be right before the process has exited
                else:
                    item.ihook.pytest_runtest_logreport(report=report)
            else:
                self._follow(message, process)
        if held is not None:
            self._finish(run, process, held)
            item.ihook.pytest_runtest_logreport(report=held)
        for stop in ("shouldstop", "shouldfail"):
            # What a test or a hook asked for there. This session counts failures for itself.
            if message[stop] and not getattr(item.session, stop):
                setattr(item.session, stop, message[stop])

    def _follow(self, message: Message, process: Process) -> None:
        """Do here what the child's session was told to do."""
        if message["event"] == "warning":
            replay_warning(self._config, message)
            return
        # The session ends, there first: it tears down what its tests have set up.
        with contextlib.suppress(ProcessDeathError):
            process.finish(self._exit_deadline())
        if message["event"] == "exit":
            pytest.exit(message["why"], message["code"])
        raise KeyboardInterrupt

    def _finish(self, run: Run, process: Process, last: pytest.TestReport) -> None:
        how: str | None = None
        try:
            process.finish(self._exit_deadline())
        except ProcessDeathError as died:
            how = str(died)
        if how is not None:
            run.death_at_exit(how, last, process.last_output())
        self.close()

    def _exit_deadline(self) -> Deadline:
        seconds = options.exit_timeout(self._config)
        return Deadline.after(seconds, f"{seconds:g} s (bcg_exit_timeout)")

    def _serves(self, file: Path) -> bool:
        return self._serving is not None and self._serving.file == file

    def _serve(self, file: Path) -> _Serving:
        """The process that serves ``file``: the one there is, or a new one."""
        if self._serving is not None and self._serving.file == file:
            return self._serving
        self.close()
        if file in self._unstartable:
            raise self._unstartable[file]
        try:
            self._serving = self._start(file)
        except ProcessDeathError as died:
            # It would die for each of the file's tests in the same way, at the cost of a start.
            death = ProcessDeathError(f"{died} while it imported the file", died.printed)
            self._unstartable[file] = death
            raise death from None
        return self._serving

    def _start(self, file: Path) -> _Serving:
        params = self._config.invocation_params
        captured = self._config.getoption("capture") != "no"
        process = Process(self._arguments(), file, params.dir, self._path, captured=captured)
        try:
            seconds = options.start_timeout(self._config)
            deadline = Deadline.after(seconds, f"{seconds:g} s (bcg_start_timeout)")
            uncollected = []
            while (message := process.receive(deadline))["event"] != "ready":
                if message["event"] == "uncollected":
                    uncollected.append(message["why"])
        except ProcessDeathError as died:
            printed = process.last_output()
            process.close()
            raise ProcessDeathError(str(died), printed) from None
        except BaseException:
            process.close()
            raise
        return _Serving(process, file, frozenset(message["tests"]), "\n".join(uncollected))

    def _arguments(self) -> list[str]:
        """This session's command line, less what would start or overwrite things a second time."""
        given = [str(argument) for argument in self._config.invocation_params.args]
        ours = ["--capture=no", "--bcg-isolate=none"]
        if self._config.pluginmanager.hasplugin("xdist"):
            ours.append("-n0")
        # Without a folder of its own the child would empty this session's --basetemp.
        if (factory := getattr(self._config, "_tmp_path_factory", None)) is not None:
            self._started += 1
            ours.append(f"--basetemp={factory.getbasetemp() / f'standalone-{self._started}'}")
        end = given.index("--") if "--" in given else len(given)
        return [*given[:end], *ours, *given[end:]]

    def _shares_process(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        return nextitem is not None and nextitem.path == item.path and self.takes(nextitem)

    @staticmethod
    def _is_last(session: pytest.Session, following: pytest.Item | None) -> bool:
        return following is None or bool(session.shouldfail or session.shouldstop)

    def _failures_left(self, session: pytest.Session) -> int:
        """How many failures the session still bears; 0 for any number of them."""
        bearable = int(self._config.getoption("maxfail") or 0)
        return max(1, bearable - session.testsfailed) if bearable else 0


_KEY = pytest.StashKey[Isolation]()


def configure(config: pytest.Config) -> None:
    config.stash[_KEY] = Isolation(config)


def of(config: pytest.Config) -> Isolation:
    return config.stash[_KEY]


def unconfigure(config: pytest.Config) -> None:
    """End what runs, also where the session broke off before it was configured in full."""
    isolation = config.stash.get(_KEY, None)
    if isolation is not None:
        isolation.close()


def _own_id(item: pytest.Item) -> str:
    """The test's id without the group that ``xdist --dist loadgroup`` may append in its workers."""
    if not item.config.getoption("loadgroup", False):
        return item.nodeid
    groups = {
        str(mark.args[0] if mark.args else mark.kwargs.get("name", "default"))
        for mark in item.iter_markers("xdist_group")
    }
    return item.nodeid.removesuffix(f"@{'_'.join(sorted(groups))}")
