"""Words for messages: sizes, figures, the first of many names, an error in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


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
