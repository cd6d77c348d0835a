"""What a report was made with."""

from __future__ import annotations

import platform

import torch
import transformers

from tw_compile import __version__


def versions() -> dict[str, str]:
    return {
        "tw_compile": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
