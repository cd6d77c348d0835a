"""The transports, which carry rows between the ranks of a group, and the choice of their kernels."""
