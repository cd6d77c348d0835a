"""Our own GEMM kernels, and matmuls that leave SMs to a kernel that runs beside them."""
