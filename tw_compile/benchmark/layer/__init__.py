"""``bench layer`` and ``bench model``: decoder layers, or a whole model with its first layers, compiled in several ways."""
