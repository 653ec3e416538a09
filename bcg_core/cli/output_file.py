"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from bcg_core.cli.option_error import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def check_writable(option: str, path: Path) -> None:
    """Refuse now what could not be written later; leaves nothing behind."""
    try:
        if path.is_dir():
            raise OptionError(option, f"{path} is a folder; name a file in it")
        if path.exists() and not path.is_file():
            raise OptionError(option, f"{path} is not a regular file; name another")
        if not path.parent.is_dir():
            raise OptionError(option, f"the folder {path.parent} does not exist; create it first")
        beside = _beside(path)
        beside.touch()
        beside.unlink()
    except (OSError, RuntimeError) as error:
        # Before Python 3.13 a link that leads to itself is a RuntimeError.
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise OptionError(
            option, f"{path} cannot be written ({reason}); name a file in a folder that can be"
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside ``path`` that takes its place when the body ends, and is removed otherwise."""
    beside = _beside(path)
    try:
        with beside.open("wb") as file:
            yield file
        os.replace(beside, path.resolve())
    finally:
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    # Beside what a link points to: a rename takes the file's place, never the link's.
    target = path.resolve()
    return target.with_name(f".{target.name}.{os.getpid()}.part")
