"""Inductor's cache of whole graphs: whether it is on, where it is, and what its keys depend on besides the graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def graph_cache_folder(options: Mapping[str, Any]) -> Path | None:
    """The folder of Inductor's caches on disk; None where graphs compiled with ``options`` are not cached there."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.runtime.runtime_utils import cache_dir

    def is_on(name: str) -> bool:
        return bool(options[name] if name in options else getattr(config, name))

    cached = is_on("fx_graph_cache") or functorch_config.enable_autograd_cache
    return Path(cache_dir()) if cached and not is_on("force_disable_caches") else None


def compile_settings(options: Mapping[str, Any]) -> str:
    """What compiling depends on besides the graph, as text: versions, modes of this thread, Inductor's options.

    The text is equal in processes that do the same, except where an option holds an object without an identity beyond its
    process.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    inductor = config.save_config_portable(ignore_private_configs=False) | dict(options)
    named = {
        name: value.uuid() if isinstance(value, CustomGraphPass) else value for name, value in sorted(inductor.items())
    }
    modes = [
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")],
    ]
    return "\n".join(map(repr, [torch.__version__, modes, named, functorch_config.save_config_portable()]))
