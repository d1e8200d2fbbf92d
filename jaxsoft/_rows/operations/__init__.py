"""The records of all row operations, one file for each function that they belong to."""

from jaxsoft._rows.operations.entropy import ENTROPY, ENTROPY_JVP, ENTROPY_VJP
from jaxsoft._rows.operations.kl_divergence import (
    KL_DIVERGENCE,
    KL_DIVERGENCE_JVP,
    KL_DIVERGENCE_VJP,
    KL_DIVERGENCE_VJP_OTHER,
)
from jaxsoft._rows.operations.labels import (
    LABEL_ENTROPY,
    LABEL_ENTROPY_JVP,
    LABEL_ENTROPY_VJP,
    LABEL_STATE,
    LABEL_STATE_JVP,
    LABEL_STATE_VJP,
    LABEL_SUMS,
    LABEL_SUMS_JVP,
    LABEL_SUMS_VJP,
)
from jaxsoft._rows.operations.log_softmax import LOG_SOFTMAX, LOG_SOFTMAX_JVP, LOG_SOFTMAX_VJP
from jaxsoft._rows.operations.logsumexp import LOGSUMEXP_JVP, LOGSUMEXP_VJP, STATE
from jaxsoft._rows.operations.softmax import SOFTMAX, SOFTMAX_JVP, SOFTMAX_VJP
from jaxsoft._rows.operations.top_k import TOP_K, TOP_K_JVP, TOP_K_VJP
from jaxsoft._rows.spec import RowSpec

OPERATIONS: tuple[RowSpec, ...] = (
    SOFTMAX,
    SOFTMAX_VJP,
    SOFTMAX_JVP,
    LOG_SOFTMAX,
    LOG_SOFTMAX_VJP,
    LOG_SOFTMAX_JVP,
    STATE,
    LOGSUMEXP_VJP,
    LOGSUMEXP_JVP,
    ENTROPY,
    ENTROPY_VJP,
    ENTROPY_JVP,
    TOP_K,
    TOP_K_VJP,
    TOP_K_JVP,
    LABEL_STATE,
    LABEL_STATE_VJP,
    LABEL_STATE_JVP,
    LABEL_SUMS,
    LABEL_SUMS_VJP,
    LABEL_SUMS_JVP,
    LABEL_ENTROPY,
    LABEL_ENTROPY_VJP,
    LABEL_ENTROPY_JVP,
    KL_DIVERGENCE,
    KL_DIVERGENCE_VJP,
    KL_DIVERGENCE_VJP_OTHER,
    KL_DIVERGENCE_JVP,
)
