"""Small rewrites of a split graph, each of which finds one form and replaces it."""
