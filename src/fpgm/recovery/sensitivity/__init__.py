"""How much harm the removal of units does to a model's outputs once the rest is solved anew."""
