"""Python's garbage collector looks at all objects again and again, and torch's modules alone are a million of them."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """What is there now is never looked at again, and what comes only after more objects than by default.

    A test that compiles makes many objects, so collecting was about a tenth of what the tests of graphs took.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
