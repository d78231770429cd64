"""Temporary hooks on a model.

Every hook of ours is added here, except those of objects that are our own: a test in
`tests/integration/test_boundaries.py` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def temporary_hooks() -> Iterator[list[RemovableHandle]]:
    """Collect handles of hooks, and remove those hooks at the end, also after an error.

    >>> from torch import nn
    >>> net = nn.Identity()
    >>> with temporary_hooks() as handles:
    ...     handles.append(net.register_forward_hook(lambda *_: None))
    ...     print(len(net._forward_hooks))
    1
    >>> len(net._forward_hooks)
    0
    """
    handles: list[RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()
