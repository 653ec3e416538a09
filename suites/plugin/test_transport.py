"""The parts beneath the isolation: messages, bounded output, the look at a file's text."""

from __future__ import annotations

import enum
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from pytest_bcg.isolation.declared import declares_standalone
from pytest_bcg.isolation.output import KEPT_BYTES, Output, mark
from pytest_bcg.isolation.transport import Channel, Decoder, TransportError, encode

if TYPE_CHECKING:
    from pathlib import Path


class _Colour(str, enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ({"a": (1, "x", None), "b": [1.5, (2,)]}, {"a": (1, "x", None), "b": [1.5, (2,)]}),
        ({"a": "\ud800 \0 \N{SNOWMAN}"}, {"a": "\ud800 \0 \N{SNOWMAN}"}),
        ({"a": _Colour.RED}, {"a": "red"}),
        ({"a": float("inf")}, {"a": float("inf")}),
        ({"a": {"b": {}, 3: ()}}, {"a": {"b": {}, "3": ()}}),
        ({"a": 1j}, {"a": "1j"}),
    ],
)
def test_messages_arrive_as_they_were_sent(sent: dict[str, Any], received: dict[str, Any]) -> None:
    decoder = Decoder()
    data = encode(sent) + encode({"next": True})
    arrived = [message for byte in data for message in decoder.feed(bytes([byte]))]
    assert arrived == [received, {"next": True}]


@pytest.mark.parametrize("body", [b"{nonsense", b"[1]", b"\xff\xff"])
def test_bytes_that_are_no_message_break_the_transport(body: bytes) -> None:
    with pytest.raises(TransportError):
        Decoder().feed(len(body).to_bytes(4, "big") + body)


def test_a_closed_end_is_told(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        Channel(theirs).send({"a": 1})
        theirs.close()
        channel = Channel(ours)
        assert channel.receive() == {"a": 1}
        with pytest.raises(TransportError, match="closed"):
            channel.receive()


@pytest.fixture
def pipe() -> Any:
    read, write = os.pipe()
    output = Output(read)
    yield output, write
    output.close()


def test_output_is_split_at_marks_and_kept_in_bounds(pipe: tuple[Output, int]) -> None:
    output, write = pipe
    os.write(write, b"setup" + mark("t", 1) + b"call " + "é".encode()[:1] + mark("t", 2) + b"rest")
    assert output.until(mark("t", 1)) == "setup"
    assert output.until(mark("t", 2)) == "call \N{REPLACEMENT CHARACTER}"
    os.close(write)
    assert output.rest() == "rest"
    assert not output.open


def test_only_the_end_of_long_output_is_kept(pipe: tuple[Output, int]) -> None:
    output, write = pipe
    for _ in range(100):
        os.write(write, b"x" * 32768)
        output.read()
    os.write(write, b"end")
    os.close(write)
    text = output.rest()
    assert text.endswith("xend")
    assert text.startswith("[the first ")
    assert KEPT_BYTES - 1 <= len(text) <= KEPT_BYTES + 60


@pytest.mark.parametrize(
    ("text", "declared"),
    [
        ("import pytest\npytestmark = pytest.mark.standalone", True),
        ("import pytest\npytestmark = [pytest.mark.bcg, pytest.mark.standalone]", True),
        ("from pytest import mark\npytestmark: list = [mark.standalone()]", True),
        ("pytestmark = pytest.mark.bcg  # not standalone", False),
        ("@pytest.mark.standalone\ndef test_it(): pass", False),
        ("def f():\n    pytestmark = pytest.mark.standalone", False),
        ("pytestmark = pytest.mark.standalone this is no Python", False),
    ],
)
def test_a_file_is_known_as_standalone_from_its_text(
    tmp_path: Path, text: str, declared: bool
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(text)
    assert declares_standalone(file) is declared
