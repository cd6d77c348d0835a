"""Data files: model presets, and which kernel serves which message on which device."""
