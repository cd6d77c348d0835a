"""all_reduce + bias + residual + RMSNorm as one operator: ``tw_compile::all_reduce_rms_norm_start`` and ``_wait_``."""
