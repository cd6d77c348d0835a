"""all_reduce + bias + residual add + RMSNorm as one operator: ``tw_compile::all_reduce_rms_norm_start`` / ``_wait_``."""
