"""The family of row operations: scores (..., n), reduced along their last axis."""
