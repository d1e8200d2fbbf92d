"""The family of linear heads: a linear layer, and what a loss needs to know of its scores, in chunks of classes."""
