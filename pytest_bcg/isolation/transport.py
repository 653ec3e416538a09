"""Messages between a pytest process and the standalone process that it started.

A message is a JSON object behind its length. Tuples stay tuples, because pytest tells them from
lists in a report; what JSON cannot hold is sent as its ``repr``. A socket carries the messages,
so nothing that a test prints can be taken for one.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

Message = dict[str, Any]

_HEADER = struct.Struct("!I")
_TUPLE = "$tuple"
_CHUNK = 65536


class TransportError(Exception):
    """The other side closed the socket, or what came through it is no message."""


def encode(message: Message) -> bytes:
    body = json.dumps(_plain(message)).encode("ascii")
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Puts messages together from the pieces in which a socket delivers them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Every message completed by ``data``; :class:`TransportError` for bytes that are none."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            try:
                message = json.loads(body, object_hook=_with_tuples)
            except ValueError as error:
                raise TransportError(f"not a message: {error}") from None
            if not isinstance(message, dict):
                raise TransportError("not a message")
            messages.append(message)
        return messages


class Channel:
    """The blocking end that the child holds."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = Decoder()
        self._waiting: list[Message] = []

    def send(self, message: Message) -> None:
        self._socket.sendall(encode(message))

    def receive(self) -> Message:
        """The next message; :class:`TransportError` once the other side is gone."""
        while not self._waiting:
            data = self._socket.recv(_CHUNK)
            if not data:
                raise TransportError("the other side closed the connection")
            self._waiting += self._decoder.feed(data)
        return self._waiting.pop(0)


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, str)):
        # A subclass of str may bring a representation of its own; the text is what is meant.
        return str.__str__(value) if isinstance(value, str) else value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return repr(value)


def _with_tuples(value: dict[str, Any]) -> object:
    return tuple(value[_TUPLE]) if value.keys() == {_TUPLE} else value
