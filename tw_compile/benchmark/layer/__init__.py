"""``tw-compile bench layer``: decoder layers compiled in several ways, checked, and timed beside each other."""
