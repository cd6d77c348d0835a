"""Read the file of a model's configuration: a shipped preset, a ``config.json`` or a checkpoint folder. Imports no torch.

This module finds errors in the file itself, early. :mod:`tw_compile.models.config` has transformers build a configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tw_compile.files import read_text

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

WHOLE_HEADS = frozenset(
    (
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt_oss",
        "granite",
        "helium",
        "llama",
        "llama4_text",
        "minimax",
        "mistral",
        "mixtral",
        "olmo",
        "phi",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    )
)
"""Model types whose tensor-parallel plan gives each rank whole attention heads; for others only transformers knows."""


_KNOWN_TYPES = ("configuration_auto.py", "auto_mappings.py")
"""The files of transformers that list its model types: the second since 5.0, beside the first."""


def preset_names() -> list[str]:
    """Names of the configurations shipped in ``configs/models``."""
    folder = resources.files("tw_compile.configs") / "models"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_model_file(source: str) -> tuple[dict[str, Any], str]:
    """The values in the file, and the name that messages use for it; nothing is downloaded.

    ``source`` is the name of a preset, the path of a ``config.json`` or a directory that holds one.

    Raises:
        ValueError: There is no such file, or it holds no JSON object, or a size that is not positive.
    """
    if source in preset_names():
        name = f"{source}.json"
        text = (resources.files("tw_compile.configs") / "models" / name).read_text()
    else:
        path = Path(source)
        try:
            path = path / "config.json" if path.is_dir() else path
            there = path.exists()
        except (OSError, ValueError):  # a name that no file can have
            there = False
        if not there:
            raise ValueError(
                f"source: expected a preset ({', '.join(preset_names())}), a config.json or a checkpoint directory, "
                f"got {source!r}{_hub_hint(source)}"
            )
        name, text = str(path), read_text(path, "source")
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"source: expected JSON in {name!r}, got {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"source: expected a JSON object in {name!r}, got {type(values).__name__}")
    try:
        check_sizes(values.get)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return values, name


def _hub_hint(source: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source, re.ASCII) is None:
        return ""
    name = source.partition("/")[2]
    return (
        "; if that is a model of the Hugging Face Hub: nothing is downloaded here, so run "
        f"'hf download {source} config.json --local-dir {name}' and give '{name}'"
    )


def text_part(values: dict[str, Any]) -> dict[str, Any]:
    """What a file says about the text model; for a multi-modal model a part of it does."""
    part = values.get("text_config")
    return part if isinstance(part, dict) else values


def check_shape(values: dict[str, Any], world_size: int | None, layers: int | None) -> None:
    """Check that a model has at least ``layers`` layers, and heads that ``world_size`` divides, as far as its file tells.

    An argument that is None is not checked.

    Raises:
        ValueError: A check fails; the message names the option, the key, what was expected and what was given.
    """
    text = text_part(values)
    depth = text.get("num_hidden_layers")
    if layers is not None and isinstance(depth, int) and layers > depth:
        raise ValueError(f"--layers: expected at most {depth}, its num_hidden_layers, got {layers}")
    if world_size is None or text.get("model_type") not in WHOLE_HEADS:
        return
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = text.get(name)
        if isinstance(heads, int) and heads % world_size:
            raise ValueError(f"--tp: expected a divisor of {heads}, its {name}, got {world_size}")


def check_model_type(values: dict[str, Any]) -> None:
    """Refuse a model type that transformers does not know, without importing it, which takes seconds.

    All types that it knows are quoted in two of its files. A type that neither quotes is unknown. Where the files are not
    found, no text is refused here.

    Raises:
        ValueError: The model type is missing, no text, or unknown.
    """
    model_type, spec = values.get("model_type"), find_spec("transformers")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [Path(folder, "models", "auto", name) for folder in folders for name in _KNOWN_TYPES]
    texts = [file.read_text() for file in files if file.is_file()]
    quoted = (f"{mark}{model_type}{mark}" for mark in ("'", '"'))
    unknown = texts and not any(name in text for name in quoted for text in texts)
    if not isinstance(model_type, str) or not model_type or unknown:
        raise ValueError(f"model_type: expected a model type that transformers knows, got {model_type!r}")


def check_sizes(get: Callable[[str, int], Any]) -> None:
    """Refuse sizes that are not positive, before any code divides by one of them."""
    for name in SIZES:
        size = get(name, 1)
        if isinstance(size, int) and size < 1:
            raise ValueError(f"{name}: expected a positive number, got {size}")
