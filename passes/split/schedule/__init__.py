"""The order of a split graph: dependences, windows, SMs, and what keeps the order."""
