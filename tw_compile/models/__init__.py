"""Tensor-parallel decoders from transformers, for inspection, tests and benchmarks."""

from __future__ import annotations

from tw_compile.model_file import preset_names
from tw_compile.models.config import load_config
from tw_compile.models.decoder import Decoder, build_decoder
from tw_compile.models.reference import reference_forward, to_double

__all__ = ["Decoder", "build_decoder", "load_config", "preset_names", "reference_forward", "to_double"]
