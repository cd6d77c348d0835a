"""The edits that make two micro-batches of a graph."""
