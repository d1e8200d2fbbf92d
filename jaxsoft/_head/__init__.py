"""The family of linear heads: what a loss needs to know of a linear layer's scores, in chunks of classes or rows."""
