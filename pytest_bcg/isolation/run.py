"""One standalone test as it runs in its process: its phases, its reports, its end."""

from __future__ import annotations

import sys
import time
import warnings
from typing import TYPE_CHECKING, Literal

import pytest

from pytest_bcg.isolation.limits import Limit
from pytest_bcg.isolation.process import Deadline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_bcg.isolation.transport import Message

Phase = Literal["setup", "call", "teardown"]


class Run:
    """Turns messages about one test into reports, and a death into the report that is missing."""

    def __init__(self, item: pytest.Item, grace: float) -> None:
        self.item = item
        self.phase: Phase = "setup"
        self._limit = Limit.of(item)
        self._grace = grace
        self._began = time.monotonic()
        self._phase_began = time.time()
        self._printed: list[tuple[str, str]] = []

    def begin(self) -> None:
        """Start the test's clock: its process is there and is told to run it now."""
        self._began = time.monotonic()
        self._phase_began = time.time()

    @property
    def deadline(self) -> Deadline | None:
        """When the watchdog ends the process: the test's own limit and the grace beyond it."""
        seconds = self._limit.seconds
        if seconds is None or (self._limit.call_only and self.phase != "call"):
            return None
        words = f"its time-out of {seconds:g} s and {self._grace:g} s of grace"
        return Deadline(self._began + seconds + self._grace, words)

    def report(self, data: Message, printed: Mapping[str, str]) -> pytest.TestReport:
        """pytest's report from its serialised form, with the output of its phase."""
        self._keep(printed)
        data["nodeid"] = self.item.nodeid  # xdist's group, if any, is known to this side alone
        data["sections"] = [*data["sections"], *self._printed]
        config = self.item.config
        report: pytest.TestReport = config.hook.pytest_report_from_serializable(
            config=config, data=data
        )
        self.phase = "call" if report.when == "setup" and report.passed else "teardown"
        self._phase_began = time.time()
        if self._limit.call_only:
            self._began = time.monotonic()
        return report

    def death(self, how: str, printed: Mapping[str, str]) -> list[pytest.TestReport]:
        """The reports still missing of a test whose process is gone: the first of them fails."""
        self._keep(printed)
        phase = self.phase
        message = f"the standalone process {how}, in the {phase} of {self.item.nodeid}"
        reports = [self._failure(phase, message)]
        if phase != "teardown":
            reports.append(self._nothing_to_tear_down())
        return reports

    def death_at_exit(
        self, how: str, report: pytest.TestReport, printed: Mapping[str, str]
    ) -> None:
        """Lay an end that was not clean to the teardown of the last test that ran."""
        self._keep(printed)
        message = f"the standalone process {how}, after its last test {self.item.nodeid}"
        if report.failed:
            report.sections.append(("Standalone process", message))
            return
        failure = self._failure("teardown", message)
        report.outcome, report.longrepr = failure.outcome, failure.longrepr
        report.sections = failure.sections
        if hasattr(failure, "wasxfail"):
            report.wasxfail = failure.wasxfail

    def _keep(self, printed: Mapping[str, str]) -> None:
        for stream, text in printed.items():
            if text:
                self._printed.append((f"Captured {stream} {self.phase}", text))

    def _failure(self, phase: Phase, message: str) -> pytest.TestReport:
        call = pytest.CallInfo.from_call(lambda: pytest.fail(message, pytrace=False), when=phase)
        report = pytest.TestReport.from_item_and_call(self.item, call)
        report.sections = list(self._printed)
        report.start, report.stop = self._phase_began, time.time()
        report.duration = report.stop - report.start
        if (reason := _expected_failure(self.item)) is not None:
            report.outcome = "skipped"
            report.wasxfail = reason
        return report

    def _nothing_to_tear_down(self) -> pytest.TestReport:
        call = pytest.CallInfo.from_call(lambda: None, when="teardown")
        return pytest.TestReport.from_item_and_call(self.item, call)


def replay_warning(config: pytest.Config, message: Message) -> None:
    """Record here a warning that the child recorded."""
    module, name = message["category"]
    category = getattr(sys.modules.get(module), name, UserWarning)
    try:
        warning = category(message["message"])
    except Exception:
        # A category with a constructor of its own: the text is what matters.
        category, warning = UserWarning, UserWarning(message["message"])
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={
            "warning_message": warnings.WarningMessage(
                warning, category, message["file"], message["line"]
            ),
            "when": "runtest",
            "nodeid": message["test"],
            "location": message["location"],
        }
    )


def _expected_failure(item: pytest.Item) -> str | None:
    """The reason of an ``xfail`` that covers any failure: one without ``raises``.

    A condition given as text is evaluated by pytest in the test's process alone, which is gone;
    such a mark does not excuse a death.
    """
    if item.config.getoption("runxfail"):
        return None
    for mark in item.iter_markers("xfail"):
        conditions = [*mark.args]
        if "condition" in mark.kwargs:
            conditions.append(mark.kwargs["condition"])
        if "raises" in mark.kwargs or any(isinstance(each, str) for each in conditions):
            continue
        if not conditions or any(conditions):
            return str(mark.kwargs.get("reason", ""))
    return None
