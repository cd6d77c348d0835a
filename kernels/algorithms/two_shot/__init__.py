"""The two-shot kernel in Triton, which serves every message, and its barrier."""
