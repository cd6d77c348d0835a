"""Measurements on the device while a graph is compiled."""
