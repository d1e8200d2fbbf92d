"""Runs Triton kernels by Triton's interpreter, for test_triton.py: python interpret_triton.py CALLS RESULTS.

Triton decides whether to interpret when it is imported, so it is a process of its own, with TRITON_INTERPRET=1. The
interpreter wants PyTorch's tensors, of which it uses little; `Tensor` is that much of one, on numpy. CALLS is a pickled
list of (operation, plan, operands, types of the results), RESULTS the pickled results.
"""

import pickle
import sys

import numpy as np

_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


class Tensor:
    """An array in memory, as the interpreter asks for it."""

    def __init__(self, array: np.ndarray):
        self.array = np.ascontiguousarray(array)
        self.dtype = _NAMES[self.array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *args, **kwargs):
        return self

    def set_(self, *args):
        pass

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def copy_(self, other):
        pass


def run(operation, cut, operands, results):
    from jaxsoft.triton_kernels.rows import kernels

    rows = operands[0].shape[0]
    outputs = [np.zeros(shape, dtype) for shape, dtype in results]
    tensors = [Tensor(v) for v in (*operands, *outputs)]
    getattr(kernels, f"{operation}_kernel")[(-(-rows // cut.rows),)](rows, *tensors, plan=cut)
    return [t.array for t in tensors[len(operands) :]]


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        calls = pickle.load(file)
    with open(sys.argv[2], "wb") as file, np.errstate(all="ignore"):
        pickle.dump([run(*call) for call in calls], file)
