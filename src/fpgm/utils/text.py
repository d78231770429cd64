"""Formatting for messages: shapes, numbers, lists of names, errors in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
"""What moves a terminal's cursor, colors it, reorders or hides text, or is not a character."""


def format_shape(shape: Iterable[int]) -> str:
    """Format a shape for people.

    >>> format_shape((1, 3, 8, 8)), format_shape(())
    ('1×3×8×8', 'a scalar')
    """
    return "×".join(str(n) for n in shape) or "a scalar"


def format_number(value: float) -> str:
    """Format a measured number in three digits, however large.

    >>> format_number(0.7871), format_number(27.66), format_number(999.7), format_number(2487.3)
    ('0.787', '27.7', '1,000', '2,490')
    """
    rounded = f"{value:.3g}"
    return f"{float(rounded):,.0f}" if abs(float(rounded)) >= 1000 else rounded


def escape_text(text: str, most: int = 1000) -> str:
    r"""Escape control characters, so that untrusted text is safe to print in one line.

    What is longer than `most` characters loses its middle.

    >>> escape_text("\x1b[2Jconv1\n"), escape_text("x" * 5000, most=8)
    ('\\x1b[2Jconv1\\n', 'xxxxx…xx')
    """
    text = escape_controls(text, lambda character: repr(character)[1:-1])
    if len(text) > most:
        end = most // 3
        text = f"{text[: most - end - 1]}…{text[len(text) - end :]}"
    return text


def escape_controls(text: str, escape: Callable[[str], str]) -> str:
    """Replace every character that a terminal would act on instead of showing it."""
    return _CONTROL.sub(lambda found: escape(found.group()), text)


def json_escape(character: str) -> str:
    r"""Write a character as JSON may.

    >>> json_escape("\x9b")
    '\\u009b'
    """
    return f"\\u{ord(character):04x}"


def shorten(names: Sequence[str], most: int = 3) -> str:
    """List the first names and how many more there are.

    >>> shorten(["a", "b", "c", "d"], most=2)
    'a, b and 2 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def suggest_name(given: object, names: Iterable[str]) -> str:
    """Suggest the nearest name in brackets, to put behind the one given.

    >>> suggest_name("fpmg", ["fpgm", "l2"]), suggest_name("x", ["fpgm"])
    (" (did you mean 'fpgm'?)", '')
    """
    hint = did_you_mean(given, names)
    return f" ({hint})" if hint else ""


def did_you_mean(given: object, names: Iterable[str], most: int = 1) -> str:
    """Suggest the names nearest to one that does not exist; no text if none is near.

    >>> did_you_mean("resnet65", ["resnet56", "resnet20"], most=3)
    "did you mean 'resnet56', 'resnet20'?"
    >>> did_you_mean("x", ["fpgm"])
    ''
    """
    near = nearest_names(given, names, most)
    return f"did you mean {', '.join(map(repr, near))}?" if near else ""


def nearest_names(
    given: object, names: Iterable[str], most: int, likeness: float = 0.6
) -> list[str]:
    """List the names most like one that does not exist, of at least this likeness from 0 to 1.

    >>> nearest_names("layer9.conv", ["layer1.conv1", "head"], most=3)
    ['layer1.conv1']
    """
    return get_close_matches(str(given), list(names), most, likeness)


def full_reason(error: BaseException) -> str:
    r"""Return everything an error says, in one line without the full stop.

    >>> full_reason(RuntimeError("Non-zero status.\n  Name: 'Add_3'."))
    "Non-zero status. Name: 'Add_3'"
    """
    return " ".join(str(error).split()).rstrip(".: ") or type(error).__name__


def reason(error: BaseException) -> str:
    r"""Return why something failed, in one line without the full stop.

    >>> reason(FileNotFoundError(2, "No such file or directory", "a.png"))
    'No such file or directory'
    >>> reason(RuntimeError("Error(s) in loading:\n\tMissing key."))
    'Error(s) in loading: Missing key'
    """
    error = getattr(error, "reason", error)  # urllib wraps what went wrong
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    first, *others = str(text).splitlines()
    if first.endswith(":") and others:
        first = f"{first} {others[0].strip()}"
    return first.rstrip(".: ")
