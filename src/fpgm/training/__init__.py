"""Training with pruning: recipes, and the trainer that runs them on one machine or many.

The trainer needs the `train` extra. It is imported when one of its names is used, so that the
recipes that come with the package can be listed without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpgm.training.distributed import part
    from fpgm.training.recipe import Recipe, make_recipe, read_recipe
    from fpgm.training.trainer import Outcome, train

__all__ = ["Outcome", "Recipe", "make_recipe", "part", "read_recipe", "train"]

_HOMES = {
    "Outcome": "trainer",
    "Recipe": "recipe",
    "make_recipe": "recipe",
    "part": "distributed",
    "read_recipe": "recipe",
    "train": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
