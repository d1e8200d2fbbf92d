"""Kernels for the scores of a linear layer, of which nothing reaches memory but what is made of them."""
