"""The row operations as Triton kernels."""
