"""The row operations as Pallas kernels."""
