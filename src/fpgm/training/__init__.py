"""Training with pruning: recipes, and the engine that runs them on one machine or many."""

from fpgm.training.distributed import part
from fpgm.training.recipe import Recipe, make_recipe, read_recipe
from fpgm.training.trainer import Outcome, train

__all__ = ["Outcome", "Recipe", "make_recipe", "part", "read_recipe", "train"]
