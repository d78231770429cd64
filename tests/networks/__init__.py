"""Random small networks made of every structure pruning has to understand.

A network is first a *description*, a frozen value that prints as something one can paste:

    Net(B("residual", shortcut="pad"), B("glu"), head=B("flatten_linear"), stem=6)

and `build` makes the same model and the same inputs from it every time. `describe` holds
descriptions, `draw` draws them, `model` builds them; the other files are the structures.
"""

from .describe import ACTIVATIONS, BLOCKS, HEADS, NORMS, B, Case, Net
from .draw import cases, draw_case, has_private_units, networks, smaller, variants
from .model import Inputs, build, call, leaves

# isort: off
# The order of blocks is the order hypothesis shrinks in and seeds draw from: plainest first.
from . import plain, residual, concat, channelwise, split, linear, memory, heads, containers
# isort: on

__all__ = [
    "ACTIVATIONS",
    "BLOCKS",
    "HEADS",
    "NORMS",
    "B",
    "Case",
    "Inputs",
    "Net",
    "build",
    "call",
    "cases",
    "channelwise",
    "concat",
    "containers",
    "draw_case",
    "has_private_units",
    "heads",
    "leaves",
    "linear",
    "memory",
    "networks",
    "plain",
    "residual",
    "smaller",
    "split",
    "variants",
]
