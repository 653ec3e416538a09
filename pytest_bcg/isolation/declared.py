"""Which test files say that they are standalone, told from their text and not by importing them."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@functools.cache
def declares_standalone(file: Path) -> bool:
    """Whether the module assigns a ``pytestmark`` that contains ``pytest.mark.standalone``."""
    try:
        text = file.read_text(encoding="utf-8")
        # Parsing costs far more than looking for the word, which few files have.
        if "standalone" not in text:
            return False
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return False
    return any(
        isinstance(part, ast.Attribute) and part.attr == "standalone"
        for statement in tree.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None
        for target in (
            statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        )
        if isinstance(target, ast.Name) and target.id == "pytestmark"
        for part in ast.walk(statement.value)
    )
