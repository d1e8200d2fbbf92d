"""Pallas Mosaic GPU kernels of attention."""
