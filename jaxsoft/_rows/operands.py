"""The operands and results that several row operations have. ffi/rows/operations.h has the same names.

Formulas write them as letters: x the scores, y the probabilities, m the maximum, s the sum, i a label or indices, t a
tangent, and g a cotangent. A file of `operations` says which other letters it uses.
"""

from jaxsoft._rows.operation import Kind, Operand

SCORES = Operand("scores", Kind.SCORES)
PROBABILITIES = Operand("probabilities", Kind.PROBABILITIES)
RESULT = Operand("result", Kind.ROW)

# The state of a row's scores.
MAXIMUM = Operand("maximum", Kind.STATISTIC)
SUM = Operand("sum", Kind.STATISTIC)

# A tangent of the scores, and what a map forward takes of it: its product with the gradient, summed over the row.
TANGENT = Operand("tangent", Kind.TANGENT, linear=True)
INNER_PRODUCT = Operand("inner_product", Kind.STATISTIC)

# Cotangents: of a result of the scores' shape, and of a number a row.
COTANGENTS = Operand("cotangents", Kind.COTANGENT, linear=True)
COTANGENT = Operand("cotangent", Kind.STATISTIC, linear=True)
