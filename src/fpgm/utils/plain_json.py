"""JSON without NaN and infinities."""

from __future__ import annotations

import json
import math
from typing import Any

from fpgm.utils.text import escape_controls, json_escape


def replace_non_finite(value: Any) -> Any:
    """Replace NaN and infinities by None.

    >>> replace_non_finite({"a": (1.0, float("nan"))})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any) -> str:
    """Write JSON that strict parsers accept: NaN and infinities become null."""
    text = json.dumps(replace_non_finite(value), indent=2, allow_nan=False, ensure_ascii=False)
    return "\n".join(escape_controls(line, json_escape) for line in text.split("\n"))
