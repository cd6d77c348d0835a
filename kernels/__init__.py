"""Fused operators and the transports that run them. Importing this package registers nothing and touches no device."""
