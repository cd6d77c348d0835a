"""What the passes make of a vLLM model's graphs: traced by vLLM's own compiler up to the passes, and not compiled.

Nothing is computed, so no operator needs a kernel for a CPU, and sizes need not be tiny in tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from fake_vllm import engine_config
from models_table import models_inspected_here
from most_used_models import ABSENT, BASE, Model
from states import SUMS_INSIDE

from tw_compile import collect_reports
from tw_compile.hosts.vllm.groups import name_of_call
from tw_compile.hosts.vllm.reasons import HostRefusal
from tw_compile.report import GraphReport

MAX_TOKENS, FIRST_HALF = 2048, 1024


@dataclass(frozen=True)
class Traced:
    """``reports``: of the graphs for the longest steps; ``refused``: why nothing is done in such an engine.

    ``by_groups``: layers were told apart, and the graphs are the embedding's and a group's of one layer. ``with_state``: some
    layers have a state, and the graphs are all pieces. ``inside``: how many sums the model's operators do by themselves.
    """

    reports: tuple[GraphReport, ...] = ()
    refused: str = ""
    by_groups: bool = False
    with_state: bool = False
    inside: dict[str, int] = field(default_factory=dict)


class NotTracedError(Exception):
    """vLLM, or torch, can't make or trace the model here; no pass has seen it."""


class _TracedError(BaseException):
    """Raised where there is nothing more to see. No ``Exception``, as torch and vLLM handle those."""


def trace(folder: Path, model: Model, **options: Any) -> Traced:
    """Make and trace ``model``. Call it within the ``groups`` of :mod:`conftest`."""
    torch._dynamo.reset()
    with models_inspected_here():
        config = _engine(folder, model, options)
    passes = [one for one in config.compilation_config.inductor_compile_config.values() if hasattr(one, "long_ranges")]
    if not passes:
        return Traced(refused=_refusal(config))
    inside: Counter[str] = Counter()
    with collect_reports() as reports:
        by_groups = _compile(config, inside)
    if by_groups is None:
        return Traced(refused=str(HostRefusal.NOT_COMPILED))
    longest = [one for one in reports if one.tokens is not None and one.tokens[1] == MAX_TOKENS and one.sites]
    return Traced(tuple(longest), by_groups=by_groups, with_state=passes[0].engine.state_space, inside=dict(inside))


def _engine(folder: Path, model: Model, options: dict[str, Any]) -> Any:
    place = folder / "".join(letter if letter.isalnum() else "-" for letter in model.name)
    place.mkdir(exist_ok=True)
    fields = {**BASE, "architectures": [model.architecture], "model_type": model.model_type, **model.config}
    given_fields = {name: value for name, value in fields.items() if value is not ABSENT}
    (place / "config.json").write_text(json.dumps(given_fields))
    if not model.known:
        make_known(model.model_type)
    given = {"strict": True, "split": str(FIRST_HALF), **options}
    return engine_config(
        folder,
        compilation={"pass_config": {"fuse_allreduce_rms": False}},
        additional_config={"tw_compile": given},
        model=str(place),
        **{"max_model_len": MAX_TOKENS, "max_num_batched_tokens": MAX_TOKENS, **model.engine},
    )


def make_known(model_type: str) -> None:
    """A configuration of that type, whose checkpoints bring a class of their own."""
    from transformers import AutoConfig, PretrainedConfig

    made = type("Config", (PretrainedConfig,), {"model_type": model_type})
    AutoConfig.register(model_type, made, exist_ok=True)


def _refusal(config: Any) -> str:
    from tw_compile.hosts.vllm.engine import engine_of

    refused = engine_of(config).refusal()
    return "" if refused is None else str(refused[0])


def _compile(config: Any, inside: Counter[str]) -> bool | None:
    """Whether long steps run by groups of layers; None where vLLM does not compile the model at all.

    Sums that are out of sight are counted in ``inside``, by their operator.
    """
    from vllm.compilation.backends import CompilerManager
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    pieces: list[tuple[Any, ...]] = []
    grouped: list[str] = []
    original = CompilerManager.compile

    def compile_part(manager: Any, graph: fx.GraphModule, *args: Any, num_graphs: int = 1, **rest: Any) -> Any:
        if num_graphs:
            pieces.append((manager, graph, args, rest))
        else:
            grouped.append("group")
            _up_to_passes(original, manager, graph, args, rest)
        return graph.forward  # a graph would become part of the code that calls it

    with ExitStack() as stack:
        default = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        stack.callback(torch.set_default_dtype, default)
        with set_current_vllm_config(config), torch.device("cpu"):
            model = initialize_model(config)
            with _weights_as_they_are():
                process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        if not any(getattr(module, "do_not_compile", True) is False for module in model.modules()):
            return None
        stack.enter_context(mock.patch.object(CompilerManager, "compile", compile_part))
        stack.enter_context(_stopping_behind_the_backend(inside))
        stack.enter_context(set_forward_context(None, vllm_config=config, num_tokens=MAX_TOKENS))
        stack.enter_context(torch.inference_mode())
        with suppress(_TracedError):
            _run(model)
        if not grouped:
            for manager, graph, args, rest in pieces:
                _up_to_passes(original, manager, graph, args, rest)
    return bool(grouped)


@contextmanager
def _weights_as_they_are() -> Iterator[None]:
    """What repacks weights needs a GPU. Their values don't matter, so they are only given the shapes that kernels want."""
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        for name, function in _REPACKED.items():
            library.impl(name, function, "CPU")
        with mock.patch(_SCALES_FOR_DEEP_GEMM, lambda wq, ws, **rest: (wq, ws)):
            yield


_SCALES_FOR_DEEP_GEMM = "vllm.model_executor.kernels.linear.scaled_mm.deep_gemm.deepgemm_post_process_fp8_weight_block"


def _marlin_weight(packed: torch.Tensor, *sizes: Any) -> torch.Tensor:
    size_k, size_n, bits, *_ = sizes[-4:]
    return torch.zeros(size_k // 16, size_n * 16 // (32 // bits), dtype=packed.dtype)


_REPACKED: dict[str, Any] = {
    "gptq_marlin_repack": _marlin_weight,
    "awq_marlin_repack": _marlin_weight,
    "gptq_shuffle": lambda *operands: None,
    "machete_prepack_B": lambda weight, *rest: weight,
}


def _run(model: Any) -> None:
    try:
        model(torch.zeros(MAX_TOKENS, dtype=torch.long), torch.arange(MAX_TOKENS), None)
    except torch._dynamo.exc.TorchDynamoException as error:
        if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
            raise
        raise NotTracedError(f"Dynamo: {type(error).__name__}") from error


def _up_to_passes(compile_part: Any, manager: Any, graph: fx.GraphModule, args: Any, rest: dict[str, Any]) -> None:
    """Run what lies before and in the slot of the passes."""
    stop = mock.patch("torch._inductor.compile_fx.GraphLowering", side_effect=_TracedError)
    with stop, torch._inductor.config.patch(force_disable_caches=True):
        try:
            compile_part(manager, graph, *args, num_graphs=0, **rest)
        except _TracedError:
            return
    raise AssertionError("expected the compiler to come to the end of the passes")


@contextmanager
def _stopping_behind_the_backend(inside: Counter[str]) -> Iterator[None]:
    from vllm.compilation.backends import VllmBackend

    original = VllmBackend.__call__

    def call(self: Any, graph: fx.GraphModule, example_inputs: Any) -> Any:
        for node in graph.graph.nodes:
            name = name_of_call(node)
            if name in SUMS_INSIDE:
                inside[name.removeprefix("vllm::")] += SUMS_INSIDE[name]
        original(self, graph, example_inputs)
        raise _TracedError

    with mock.patch.object(VllmBackend, "__call__", call):
        yield
