"""Helpers for tests and for checking an installation; not imported by the rest of the package."""
