"""The standalone process's side: collect one file, then run its tests as the parent asks.

The parent's own command line makes this session, so configuration, plugins and conftests are
the same; a plugin takes out what only the parent may do (schedule, select, print, cache).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_bcg.isolation.output import mark
from pytest_bcg.isolation.transport import Channel, TransportError

if TYPE_CHECKING:
    import warnings
    from collections.abc import Sequence

_LINUX_SET_PARENT_DEATH_SIGNAL = 1
_SOUND = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
# Options that select, stop, repeat or print: the parent has done so, or does.
_PARENT_ALONE: dict[str, object] = {
    "bcg_isolate": "none",
    "bcg_nightly": True,
    "bcg_serves": True,
    "bcg_suites": [],
    "cacheclear": False,
    "cacheshow": None,
    "collectonly": False,
    "failedfirst": False,
    "keyword": "",
    "lf": False,
    "log_file_mode": "a",
    "markexpr": "",
    "maxfail": 0,
    "newfirst": False,
    "pastebin": None,
    "show_fixtures_per_test": False,
    "showfixtures": False,
    "stepwise": False,
    "stepwise_skip": False,
    "xmlpath": None,
}


def main(arguments: Sequence[str]) -> None:
    """Run the child: ``descriptor token captured file``, then pytest's own arguments."""
    descriptor, token, captured, file, *rest = arguments
    _die_with_parent()
    sock = socket.socket(fileno=int(descriptor))
    sock.set_inheritable(False)
    plugin = Child(Channel(sock), token, file, captured=captured == "1")
    code = pytest.main(rest, plugins=[plugin])
    # What the tests did is in their reports: only a session that broke down is told by the code.
    sound = plugin.finished and code in _SOUND
    sys.exit(0 if sound else int(code) or 1)


class Child:
    """The plugin that makes a session out of the parent's command line serve the parent."""

    def __init__(self, channel: Channel, token: str, file: str, *, captured: bool) -> None:
        self._channel = channel
        self._token = token
        self._file = file
        self._pid = os.getpid()
        self._marks = 0
        self.finished = False
        # Own descriptors, because a test may replace or close the standard ones.
        self._streams: list[int] = []
        stack_output = 2
        if captured:
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(  # type: ignore[union-attr]
                    encoding="utf-8", errors="replace", write_through=True
                )
            self._streams = [os.dup(1), os.dup(2)]
            stack_output = self._streams[1]
        faulthandler.register(signal.SIGUSR2, file=stack_output, all_threads=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        self._config = config
        config.args = [self._file]
        for name, value in _PARENT_ALONE.items():
            setattr(config.option, name, value)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        manager = config.pluginmanager
        for name in ("lfplugin", "nfplugin", "stepwiseplugin"):
            if (cached := manager.get_plugin(name)) is not None:
                manager.unregister(cached)
        if (reporter := manager.get_plugin("terminalreporter")) is not None:
            manager.unregister(reporter)
            manager.register(_Silent(reporter), "terminalreporter")

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._send({"event": "uncollected", "why": report.longreprtext})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._send({"event": "ready", "tests": list(items)})
        while (command := self._next_command())["do"] == "run":
            item, following = items[command["test"]], items.get(command["next"])
            left = command["failures_left"]
            # Counted on from what failed here, so that the last test's teardown knows it is last.
            session.config.option.maxfail = session.testsfailed + left if left else 0
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except KeyboardInterrupt:
                self._send({"event": "interrupted"})
                raise
            except pytest.exit.Exception as error:
                self._send({"event": "exit", "why": error.msg, "code": error.returncode})
                raise
            if os.getpid() != self._pid:
                # A test forked, and this is the copy: the original goes on with the session.
                os._exit(0)
            stops = {"shouldstop": session.shouldstop, "shouldfail": session.shouldfail}
            self._send({"event": "done", "test": command["test"], **stops})
        self.finished = True
        return True

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._marks += 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if os.getpid() == self._pid:
            for descriptor in self._streams:
                with contextlib.suppress(OSError):
                    os.write(descriptor, mark(self._token, self._marks))
        # pytest fails a test for its subtests only as it asks for the status, which is printed.
        self._config.hook.pytest_report_teststatus(report=report, config=self._config)
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send({"event": "report", "report": data})

    @pytest.hookimpl
    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if when == "runtest":
            self._send(
                {
                    "event": "warning",
                    "message": str(warning_message.message),
                    "category": (
                        warning_message.category.__module__,
                        warning_message.category.__qualname__,
                    ),
                    "file": warning_message.filename,
                    "line": warning_message.lineno,
                    "test": nodeid,
                    "location": location,
                }
            )

    def _next_command(self) -> dict[str, Any]:
        try:
            return self._channel.receive()
        except (TransportError, OSError):
            # Without the parent there is nobody to run a test for.
            os._exit(1)

    def _send(self, message: dict[str, Any]) -> None:
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._channel.send(message)


class _Silent:
    """The terminal reporter for those who look it up, out of pytest's hooks: it prints nothing."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reporter, name)


def _die_with_parent() -> None:
    """Where Linux can, have the kernel kill this process as soon as the parent is gone."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_LINUX_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
