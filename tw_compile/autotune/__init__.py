"""What is timed on the device while a graph is compiled."""
