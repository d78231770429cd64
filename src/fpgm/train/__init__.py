"""Training with pruning: recipes, and the engine that runs them on one machine or many."""

from fpgm.train.engine import Outcome, train
from fpgm.train.processes import part
from fpgm.train.recipe import Recipe, make_recipe, read_recipe

__all__ = ["Outcome", "Recipe", "make_recipe", "part", "read_recipe", "train"]
