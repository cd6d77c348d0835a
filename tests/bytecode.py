"""Modules are compiled to bytecode once in a run of the tests, also where Python is told to write none.

A process that finds none compiles all of torch that it imports, which takes longer than the import. The tests start many.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile


def keep_bytecode() -> None:
    """Where this process writes no bytecode: write it to a folder, for the processes that it starts too.

    The folder is gone when this process ends. Elsewhere bytecode is kept already, and nothing changes.
    """
    if not sys.dont_write_bytecode:
        return
    folder = tempfile.mkdtemp(prefix="tw_compile_bytecode_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
    sys.dont_write_bytecode = False
