"""What a rule is: a function of the tracer, an operator's name, its call and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpgm.tracing.tracer import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[["Tracer", str, Args, Kwargs, Any], None]
