"""Words for messages: sizes, figures, the first of many names, an error in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
"""What moves a terminal's cursor, colours it, reorders or hides text, or is no character at all."""


def size(shape: Iterable[int]) -> str:
    """A shape for people.

    >>> size((1, 3, 8, 8)), size(())
    ('1×3×8×8', 'a scalar')
    """
    return "×".join(str(n) for n in shape) or "a scalar"


def figure(value: float) -> str:
    """A measured number in three digits, however large.

    >>> figure(0.7871), figure(27.66), figure(999.7), figure(2487.3)
    ('0.787', '27.7', '1,000', '2,490')
    """
    rounded = f"{value:.3g}"
    return f"{float(rounded):,.0f}" if abs(float(rounded)) >= 1000 else rounded


def printable(text: str, most: int = 1000) -> str:
    r"""Text of unknown origin in one line that a terminal only shows: controls become escapes.

    What is longer than `most` characters loses its middle.

    >>> printable("\x1b[2Jconv1\n"), printable("x" * 5000, most=8)
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
    """The first names and how many more.

    >>> shorten(["a", "b", "c", "d"], most=2)
    'a, b and 2 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def meant(given: object, names: Iterable[str]) -> str:
    """A hint at the name that was perhaps meant, to put behind the one given.

    >>> meant("fpmg", ["fpgm", "l2"]), meant("x", ["fpgm"])
    (" (did you mean 'fpgm'?)", '')
    """
    near = get_close_matches(str(given), list(names), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def reason(error: BaseException) -> str:
    r"""Why something failed, in one line without the full stop.

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
