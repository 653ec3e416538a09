"""A standalone process as its parent sees it: started, listened to, and ended with its children."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_bcg.isolation import descendants
from pytest_bcg.isolation.output import Output, mark
from pytest_bcg.isolation.transport import Decoder, Message, TransportError, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# The path entry that "-c" puts first must not shadow modules before the real path is set.
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from pytest_bcg.isolation.child import main; main(sys.argv[2:])"
)
_POLL = 0.1
_DUMP_GRACE = 0.5
_TERMINATE_GRACE = 2.0
# How long an exit may take after the socket closed, before the open process counts as the fault.
_CLOSING_GRACE = 1.0
_CHUNK = 65536


class ProcessDeathError(Exception):
    """The process ended, or had to be ended; the message says how (``SIGSEGV``, an exit code)."""

    def __init__(self, how: str, printed: Mapping[str, str] | None = None) -> None:
        super().__init__(how)
        self.printed = printed


@dataclass(frozen=True)
class Deadline:
    """When a wait ends (of ``time.monotonic``), and the limit behind it in words."""

    at: float
    limit: str

    @classmethod
    def after(cls, seconds: float, limit: str) -> Deadline:
        return cls(time.monotonic() + seconds, limit)

    @property
    def left(self) -> float:
        return self.at - time.monotonic()


class Process:
    """One child. Every wait reads its output too, so a child that prints is never blocked.

    Args:
        arguments: pytest's command line for the child.
        folder: the working directory.
        path: the child's ``sys.path``.
        captured: whether its output is read here; else it goes where this process's output goes.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        file: Path,
        folder: Path,
        path: Sequence[str],
        *,
        captured: bool,
    ) -> None:
        self.token = uuid.uuid4().hex
        self._decoder = Decoder()
        self._messages: list[Message] = []
        self._closed = False
        self._marks = 0
        self._socket, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self._popen = subprocess.Popen(
                [
                    *(sys.executable, *_interpreter_flags(), "-c", _BOOTSTRAP, json.dumps([*path])),
                    *(str(theirs.fileno()), self.token, str(int(captured)), str(file)),
                    *arguments,
                ],
                cwd=folder,
                env={**os.environ, descendants.TOKEN_VARIABLE: self.token},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if captured else None,
                stderr=subprocess.PIPE if captured else None,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._outputs: Mapping[str, Output] = {}
        if self._popen.stdout is not None and self._popen.stderr is not None:
            # The descriptors are taken over, so that they close with the outputs alone.
            self._outputs = {
                "stdout": Output(os.dup(self._popen.stdout.fileno())),
                "stderr": Output(os.dup(self._popen.stderr.fileno())),
            }
            self._popen.stdout.close()
            self._popen.stderr.close()
            for output in self._outputs.values():
                self._selector.register(output, selectors.EVENT_READ)

    def send(self, message: Message) -> None:
        """Send a command; a child that is gone is noticed by the next :meth:`receive`."""
        try:
            self._socket.setblocking(True)
            self._socket.sendall(encode(message))
        except OSError:
            self._closed = True
        finally:
            self._socket.setblocking(False)

    def receive(self, deadline: Deadline | None) -> Message:
        """The next message.

        Raises:
            ProcessDeathError: the child is gone, lost its result pipe, or ``deadline`` passed; the
                process is ended by then, and so are its children.
        """
        while not self._messages:
            if self._popen.poll() is not None:
                self._drain()
                if self._messages:
                    break
                raise ProcessDeathError(self._ended())
            if self._closed:
                raise ProcessDeathError(self._lost())
            if deadline is not None and deadline.left <= 0:
                self._end_hung()
                raise ProcessDeathError(f"was killed: it had not ended within {deadline.limit}")
            self._listen(_POLL if deadline is None else min(_POLL, deadline.left))
        return self._messages.pop(0)

    def finish(self, deadline: Deadline) -> None:
        """Let the session end and wait for the exit; whatever the child leaves running is killed.

        Raises:
            ProcessDeathError: the exit was not a clean one, or did not come.
        """
        self.send({"do": "finish"})
        while self._popen.poll() is None:
            if deadline.left <= 0:
                self._end_hung()
                raise ProcessDeathError(f"was killed: it had not exited within {deadline.limit}")
            self._pause()
        ended = self._ended()
        if self._popen.returncode != 0:
            raise ProcessDeathError(ended)

    def output(self) -> dict[str, str]:
        """What the child printed in the phase whose report was received last."""
        self._marks += 1
        end = mark(self.token, self._marks)
        return {name: output.until(end) for name, output in self._outputs.items()}

    def last_output(self) -> dict[str, str]:
        """What the child printed after the last report."""
        return {name: output.rest() for name, output in self._outputs.items()}

    def kill(self) -> None:
        """End the process and all that it started, at once. Harmless when it has ended."""
        descendants.kill_all(self._popen.pid, self.token)
        self._popen.wait()

    def close(self) -> None:
        """Kill what is left and give every descriptor back."""
        if self._socket.fileno() < 0:
            return
        self.kill()
        self._selector.close()
        self._socket.close()
        for output in self._outputs.values():
            output.close()

    def _listen(self, timeout: float) -> None:
        for key, _ in self._selector.select(max(0.0, timeout)):
            source = key.fileobj
            if isinstance(source, Output):
                if not source.read() and not source.open:
                    self._selector.unregister(source)
            elif not self._take():
                self._closed = True
                self._selector.unregister(source)

    def _take(self) -> bool:
        """Read one piece from the socket; ``False`` once there will be no more messages."""
        try:
            data = self._socket.recv(_CHUNK)
            self._messages += self._decoder.feed(data)
        except BlockingIOError:
            return True
        except (OSError, TransportError):
            return False
        return bool(data)

    def _drain(self) -> None:
        """Take what the dead process had sent; a grandchild may hold the socket open."""
        while not self._closed:
            waiting = len(self._messages)
            self._closed = not self._take()
            if len(self._messages) == waiting:
                break

    def _ended(self) -> str:
        """How the process ended; what it left running is killed."""
        self.kill()
        code = self._popen.returncode
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"died of {signal.Signals(-code).name}"
        except ValueError:
            return f"died of signal {-code}"

    def _lost(self) -> str:
        if self._exits_within(_CLOSING_GRACE):
            return self._ended()
        self._end_hung()
        return "lost its result pipe, so it was killed"

    def _end_hung(self) -> None:
        """Ask for the stacks of all threads, then to terminate, then kill the whole group."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGUSR2)
            if not self._exits_within(_DUMP_GRACE):
                descendants.signal_group(self._popen.pid, signal.SIGTERM)
                self._exits_within(_TERMINATE_GRACE)
        self.kill()

    def _exits_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._popen.poll() is None and time.monotonic() < deadline:
            self._pause()
        return self._popen.poll() is not None

    def _pause(self) -> None:
        """Wait a moment for an exit, which nothing announces once the socket has closed."""
        self._listen(_POLL)
        if self._closed:
            time.sleep(_POLL / 20)


def _interpreter_flags() -> list[str]:
    """The flags under which this interpreter runs (``-W``, ``-X``, ``-O``…), for the child."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined, no-any-return]
