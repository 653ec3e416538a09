"""Lines for the person, on standard error: one message is one line."""

from __future__ import annotations

import sys


def tell(text: str, style: str) -> None:
    """Print ``text`` as one line, coloured where there is a terminal and rich is installed."""
    line = " ".join(text.split())
    try:
        from rich.console import Console
    except ImportError:
        print(line, file=sys.stderr)
    else:
        console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False, markup=False)
        console.print(line, style=style)
