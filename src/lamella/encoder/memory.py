"""Whether an error means that memory ran out."""

from __future__ import annotations


def is_out_of_memory(error: Exception) -> bool:
    """Accelerate knows how PyTorch says so; CUDA's matrix library, left without room for itself, says it otherwise."""
    from accelerate.utils.memory import should_reduce_batch_size

    return should_reduce_batch_size(error) or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)
