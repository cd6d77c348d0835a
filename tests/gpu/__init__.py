"""Tests on GPUs, a package so that checks have one name for tests and for their own processes."""
