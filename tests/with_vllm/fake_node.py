"""A pytest plugin (``-p fake_node``): vLLM's own tests on the node of :mod:`fake_vllm`, in this process and those it starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import fake_vllm

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_before = {name: os.environ.get(name) for name in _RANK_VARIABLES}
_folder = tempfile.mkdtemp(prefix="tw_fake_node_")
fake_vllm.prepare(Path(_folder))
for _name, _value in _before.items():  # those tests make their groups themselves
    if _value is None:
        del os.environ[_name]
    else:
        os.environ[_name] = _value
for _name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
    os.environ[_name] = os.pathsep.join(filter(None, (_folder, os.environ.get(_name))))
