"""``bench layer`` and ``bench model``: decoder layers, or a model's first ones as a whole, compiled in several ways."""
