"""Tensor-parallel decoders from transformers, for inspection, tests and benchmarks."""
