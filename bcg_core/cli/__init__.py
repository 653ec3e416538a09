"""The console script ``bcg``. Exit codes: 0 fine, 1 a failure, 2 a mistake in the usage."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

from bcg_core.cli.option_error import OptionError
from bcg_core.cli.stderr import tell

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXTRA = ("typer", "rich", "diffusers", "transformers", "tokenizers", "safetensors", "PIL")
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Whatever goes wrong is one line on standard error and an exit code.

    ``BCG_TRACEBACK=1`` shows the traceback of a failure as well.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = f"bcg {words[0]}" if words and not words[0].startswith("-") else "bcg"
    try:
        from bcg_core.cli.commands import application

        code = application(words or ["--help"], prog_name="bcg", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OptionError as error:
        return _complain(f"{command}: {error}", 2)
    except Exception as error:
        return _failed(command, error)


def _failed(command: str, error: Exception) -> int:
    # typer's classes for mistakes are click's own or a copy of them, as its version has it.
    say_mistake = getattr(error, "format_message", None)
    if say_mistake is not None:
        return _complain(f"{command}: {say_mistake().rstrip('.')}; see {command} --help", 2)
    if type(error).__name__ == "Abort":
        return _INTERRUPTED
    if os.environ.get("BCG_TRACEBACK") == "1":
        traceback.print_exc()
    missing = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in _EXTRA:
        return _complain(
            f"{command}: {missing} is not installed; pip install 'pytest-bcg[diffusers]'", 1
        )
    return _complain(
        f"{command}: failed: {type(error).__name__}: {error} (BCG_TRACEBACK=1 shows where)", 1
    )


def _complain(text: str, code: int) -> int:
    tell(text, "red")
    return code
