"""What a graph says about its tokens and layers, and which split is chosen for it. Nothing here edits."""
