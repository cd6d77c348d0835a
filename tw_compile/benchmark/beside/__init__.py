"""``bench beside``: what a fused call and a GEMM cost each other when both run at once, as in a split layer."""
