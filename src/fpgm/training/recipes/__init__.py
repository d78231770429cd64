"""The recipes that come with the package, for `fpgm train`."""

from fpgm.training.recipes.paths import SHIPPED

__all__ = ["SHIPPED"]
