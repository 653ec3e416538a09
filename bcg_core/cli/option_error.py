"""The person's mistake: one line that names the option and the way out, and exit code 2."""

from __future__ import annotations


class OptionError(Exception):
    """``option`` is as typed (``--width``); ``message`` says what is wrong and what to do."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option
