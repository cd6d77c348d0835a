"""The two-shot kernel in Triton. It serves messages of every size, but neither wires nor scales that are made of the result."""
