"""Kernels of the fused operator over peer memory, one folder each."""
