"""What a report was made with."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from tw_compile import __version__
from tw_compile.environment import peer_access
from tw_compile.sources import source_digest
from tw_compile.torch_files import torch_version


def versions() -> dict[str, str]:
    """Versions, the commit (``unknown`` outside of a git checkout), and a digest of the package's sources."""
    return {
        "tw_compile": __version__,
        "commit": _commit(),
        "source": source_digest()[:12],
        "torch": torch_version(),
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def machine() -> str:
    return f"{platform.machine()} {os.cpu_count()} cpus"


def peer_access_word() -> str:
    """``off`` if TW_COMPILE_PEER_ACCESS is 0; ``on``: peer access is used where the GPUs have it."""
    return "on" if peer_access() else "off"


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed. Without it torch has no GPU, so torch need not be imported to find out."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def nccl_version() -> str | None:
    """The version of torch's NCCL; None where torch has no GPU."""
    if not has_driver():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:  # no git here
        return "unknown"
    return result.stdout.strip() or "unknown"
