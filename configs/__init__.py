"""Data files: model presets."""
