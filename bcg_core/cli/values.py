"""What a person types for an option, turned into a value or refused by the option's name."""

from __future__ import annotations

import difflib
import math
import re

from bcg_core.cli.option_error import OptionError

MAX_SIDE = 8192
MAX_STEPS = 1000
MAX_BUCKET = 4096
DTYPES = ("auto", "float32", "bfloat16", "float16")
BACKENDS = ("auto", "cuda", "simulated")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def text(option: str, value: str | None) -> None:
    """Refuse bytes that were no text in the terminal's encoding, which no tokenizer takes."""
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            option, f"character {error.start + 1} is not valid UTF-8; write it anew"
        ) from None


def boolean(option: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise OptionError(option, f"{text!r} is neither true nor false; write one of them")
    return text.lower() == "true"


def choice(option: str, text: str, known: tuple[str, ...]) -> str:
    if text in known:
        return text
    near = difflib.get_close_matches(text, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise OptionError(option, f"{text!r} is not one of {', '.join(known)}{hint}")


def device(option: str, text: str) -> str:
    if _DEVICE.fullmatch(text) is None:
        raise OptionError(option, f"{text!r} is no device; write auto, cpu, cuda or cuda:N")
    return text


def side(option: str, value: int, multiple: int = 1) -> int:
    """Pixels of one side of the picture."""
    if not 1 <= value <= MAX_SIDE:
        raise OptionError(
            option, f"{value} is not a size; use a multiple of {max(multiple, 8)} up to {MAX_SIDE}"
        )
    if value % multiple:
        below = value // multiple * multiple
        near = f"{below} or {below + multiple}" if below else str(multiple)
        raise OptionError(option, f"{value} is not divisible by {multiple}; use {near}")
    return value


def whole(option: str, value: int, lowest: int, highest: int) -> int:
    if not lowest <= value <= highest:
        raise OptionError(option, f"{value} is out of range; use {lowest} to {highest}")
    return value


def guidance(option: str, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise OptionError(option, f"{value} is no guidance scale; use 0 (none) or more, such as 5")
    return value


def buckets(option: str, text: str | None) -> tuple[int, ...]:
    """Caption lengths, such as ``64,128``."""
    if text is None:
        return ()
    lengths: list[int] = []
    for part in text.split(","):
        digits = part.strip().lstrip("0")
        # int() refuses very long numbers by an error of its own.
        if not (digits.isdecimal() and len(digits) <= 9 and int(digits) <= MAX_BUCKET):
            raise OptionError(
                option,
                f"{part!r} in {text!r} is no caption length; write whole numbers from 1 to "
                f"{MAX_BUCKET} with a comma between, such as 64,128",
            )
        if int(digits) in lengths:
            raise OptionError(option, f"{int(digits)} is there twice in {text!r}; write it once")
        lengths.append(int(digits))
    return tuple(lengths)


def breaks(option: str, text: str) -> str | tuple[str, ...]:
    """``auto``, ``attention``, ``none``, or patterns with a comma between."""
    if text in ("auto", "attention", "none"):
        return text
    patterns = tuple(part.strip() for part in text.split(","))
    if not all(patterns):
        raise OptionError(
            option,
            f"{text!r} has an empty pattern; write auto, attention, none, or patterns with a comma "
            "between, such as layers.*.attention,Attention",
        )
    words = [word for word in ("auto", "attention", "none") if word in patterns]
    if words:
        raise OptionError(option, f"{words[0]} stands alone, not among patterns; got {text!r}")
    return patterns
