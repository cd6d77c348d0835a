"""Words of memory that streams themselves write and wait for: stream memory operations of the CUDA driver.

The GPU's front end does this, so nothing runs on an SM while a stream waits. The driver's bindings are loaded when an operation
is made. Captured operations become nodes of the graph. A wait of a stream never gives up. In debug mode a kernel waits instead
(``await_word.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tw_compile.kernels.runtime import bindings

_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ"""


def write(address: int, value: int) -> Any:
    """The operation that writes ``value`` to the word of 4 bytes at ``address``.

    All that the stream did before can be seen by whoever sees the value.
    """
    return _operation("writeValue", "WRITE", address, value, 0)


def wait(address: int, value: int) -> Any:
    """The operation that lets the stream go on when the word of 4 bytes at ``address`` equals ``value``."""
    return _operation("waitValue", "WAIT", address, value, _EQUAL)


def enqueue(operations: Sequence[Any], stream: int, where: str) -> None:
    """Let ``stream``, a stream handle, do these operations one after the other. RuntimeError says ``where`` it failed."""
    driver = bindings.load("driver")
    bindings.call(driver.cuStreamBatchMemOp, stream, len(operations), operations, 0, where=where)


def _operation(part: str, kind: str, address: int, value: int, flags: int) -> Any:
    driver = bindings.load("driver")
    made = driver.CUstreamBatchMemOpParams()
    made.operation = getattr(driver.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{kind}_VALUE_32")
    fields = getattr(made, part)
    fields.operation, fields.address, fields.value, fields.flags = made.operation, address, value, flags
    return made
