"""A linear layer and what a loss needs to know of its scores, which are never in memory all at once."""
