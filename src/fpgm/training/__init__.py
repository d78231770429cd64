"""Training with pruning: recipes, and the trainer that runs them on one machine or many.

The trainer needs the `train` extra. It is imported when one of its names is used, so that the
recipes that come with the package can be listed without it.
"""

from typing import TYPE_CHECKING

from fpgm.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from fpgm.training.distributed import destroy_process_group
    from fpgm.training.recipe import Recipe, make_recipe, read_recipe
    from fpgm.training.trainer import Outcome, train

__all__ = ["Outcome", "Recipe", "destroy_process_group", "make_recipe", "read_recipe", "train"]

__getattr__ = lazy_exports(
    __name__,
    {
        "Outcome": "trainer",
        "Recipe": "recipe",
        "destroy_process_group": "distributed",
        "make_recipe": "recipe",
        "read_recipe": "recipe",
        "train": "trainer",
    },
)
