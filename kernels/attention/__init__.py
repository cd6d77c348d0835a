"""Attention of a suffix of the tokens, which sees the keys and values of the prefix."""
