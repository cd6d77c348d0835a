"""Hosts: what compiles a model and calls the passes."""
