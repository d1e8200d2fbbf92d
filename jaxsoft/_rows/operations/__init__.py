"""The records of all row operations, one file for each function that they belong to."""

from jaxsoft._rows.operations.entropy import entropy_of_rows
from jaxsoft._rows.operations.kl_divergence import kl_divergence_of_rows
from jaxsoft._rows.operations.labels import label_entropy_of_rows, label_state_of_rows, label_sums_of_rows
from jaxsoft._rows.operations.log_softmax import log_softmax_of_rows
from jaxsoft._rows.operations.logsumexp import logsumexp_of_rows
from jaxsoft._rows.operations.softmax import softmax_of_rows
from jaxsoft._rows.operations.top_k import top_k_of_rows
from jaxsoft._rows.spec import RowSpec

_FUNCTIONS = (
    softmax_of_rows,
    log_softmax_of_rows,
    logsumexp_of_rows,
    entropy_of_rows,
    top_k_of_rows,
    label_state_of_rows,
    label_sums_of_rows,
    label_entropy_of_rows,
    kl_divergence_of_rows,
)
OPERATIONS: tuple[RowSpec, ...] = tuple(
    operation
    for function in _FUNCTIONS
    for operation in (function.forward, function.pullback, *function.pullback_of.values(), function.tangent)
)
