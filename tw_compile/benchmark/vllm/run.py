"""Run the engines of a benchmark, group by group, and put what they found into a report. Imports no vLLM."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tw_compile.benchmark.vllm.results import VllmRow, compare, judge, logprob_error, measure, unrelated
from tw_compile.benchmark.vllm.spec import EngineStart, VllmSpec, engines, groups, is_float8, traces_of
from tw_compile.benchmark.vllm.traces import ACCURACY, turns
from tw_compile.benchmark.vllm.turns import take_turns
from tw_compile.harness.launch import sigterm_interrupts
from tw_compile.harness.requests import UsageError
from tw_compile.harness.rows import SCHEMA_VERSION
from tw_compile.harness.variables import for_measurements
from tw_compile.harness.versions import installed_version, machine, nccl_version, peer_access_word, versions


def require_vllm() -> None:
    """Raise UsageError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("bench vllm: expected vLLM to be installed beside tw_compile, got an environment without it")


def write_model(spec: VllmSpec, folder: Path) -> Any:
    """Write ``config.json`` to ``folder``, cut to ``spec.layers`` layers. Returns transformers' configuration.

    Raises:
        UsageError: There is no such model, it has too few layers or positions, or the reference can't have its weights.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tw_compile.runner.model import model_config

    config = model_config(spec.model, spec.layers)
    plan = engines(spec, str(folder))
    if any(engine.variant.kind == "reference" for engine in plan):
        _check_reference(spec.model, config)
    longest = max(trace.longest for engine in plan for trace in engine.traces)
    if longest > config.max_position_embeddings:
        raise UsageError(
            f"--prompt-tokens, --requests, --decode-tokens: expected at most {config.max_position_embeddings} tokens of a "
            f"request, the positions of {spec.model}, got {longest}"
        )
    if not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return config


def _check_reference(model: str, config: Any) -> None:
    """Raise UsageError if the weights are quantised in a way that the reference can't follow.

    Kernels of experts have layouts of their own, so random experts in float8 may not be those of the reference.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return
    found = f"quant_method {quantisation.get('quant_method')!r}"
    experts = any("experts" in name and value for name, value in config.to_dict().items())
    if experts or not is_float8(quantisation):
        raise UsageError(
            f"--only: expected variants without reference for {model}, as the reference knows quantised weights only in "
            f"float8 and not of experts, got {found}{' with experts' if experts else ''} and the reference"
        )


def steps(spec: VllmSpec) -> int:
    """How often :func:`run` calls ``progress``, unless all engines of a group fail."""
    return sum(1 + len(turns(traces_of(group), spec.repeats)) for group in groups(spec, engines(spec, "")))


def run(spec: VllmSpec, progress: Callable[[str], None], logs: str | None = None) -> dict[str, Any]:
    """Run the whole benchmark, and return the report as plain values. An engine that fails is a row with the reason.

    Once a timed round is done, Ctrl-C or SIGTERM end the benchmark with the rounds that are done. ``logs``: a folder to keep
    the engines' output in.

    Raises:
        UsageError: ``spec`` names a model or variants that are not there.
    """
    findings: list[dict[str, Any]] = []
    whole = True
    with (
        tempfile.TemporaryDirectory(prefix="tw_compile_") as scratch,
        for_measurements() as environment,
        sigterm_interrupts(),
    ):
        folder = Path(scratch) / "model"
        config = write_model(spec, folder)
        plan = engines(spec, str(folder))
        for group in groups(spec, plan):
            kept = Path(logs) if logs else None
            if not whole:
                findings += [{"error": "interrupted before it was started", "lines": []} for _ in group]
                continue
            of_group, whole = take_turns(group, spec, config, Path(scratch), kept, progress)
            findings += of_group
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "bench vllm",
        "machine": machine(),
        "peer_access": peer_access_word(),
        "device_name": next((finding["device_name"] for finding in findings if "device_name" in finding), None),
        "model": spec.model,
        "world_size": spec.world_size,
        "dtype": spec.dtype,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "repeats": spec.repeats,
        "incomplete": None if whole else "interrupted, so medians are of the rounds that were done",
        "seed": spec.seed,
        "together": spec.together,
        "environment": environment,
        "engines": [described(engine) | _facts(finding) for engine, finding in zip(plan, findings, strict=True)],
        "rows": [asdict(row) for row in rows(plan, findings, spec.world_size)],
        "versions": {
            **versions(),
            "vllm": installed_version("vllm"),
            "nccl": nccl_version(),
            "flashinfer": installed_version("flashinfer-python"),
        },
    }


def rows(plan: list[EngineStart], findings: list[dict[str, Any]], world_size: int) -> list[VllmRow]:
    """A row for every engine and trace; ``findings`` is what the engines of ``plan`` found, or their ``error``."""
    result = []
    of_kind = {
        (engine.variant.kind, engine.chunk, trace): own
        for engine, finding in zip(plan, findings, strict=True)
        if "error" not in finding
        for trace, own in zip(engine.traces, finding["traces"], strict=True)
    }
    for engine, finding in zip(plan, findings, strict=True):
        for index, trace in enumerate(engine.traces):
            row = VllmRow(
                engine.variant.label,
                engine.variant.kind,
                trace.kind,
                engine.chunk,
                len(trace.prompts),
                wire=engine.variant.wire,
            )
            result.append(row)
            if "error" in finding:
                row.reason = finding["error"]
                continue
            row.startup_s, row.compile_s, row.peak_bytes = (
                finding[name] for name in ("startup_seconds", "compile_seconds", "peak_bytes")
            )
            row.flashinfer_importable, row.flashinfer_fusion_bytes = (
                finding[name] for name in ("flashinfer_importable", "flashinfer_fusion_bytes")
            )
            own = finding["traces"][index]
            baseline, reference = (of_kind.get((kind, engine.chunk, trace)) for kind in ("baseline", "reference"))
            if trace.kind == ACCURACY:
                _measure_accuracy(row, own, baseline, reference)
                continue
            measure(row, trace, own["rounds"])
            if baseline is not None and baseline is not own and engine.variant.kind != "bound":
                row.compared, row.differing = compare(own["tokens"], baseline["tokens"])
    judge(result, world_size)
    return result


def _measure_accuracy(
    row: VllmRow, own: dict[str, Any], baseline: dict[str, Any] | None, reference: dict[str, Any] | None
) -> None:
    if own is reference:
        row.reason = None if baseline is None else unrelated(baseline["logprobs"], own["logprobs"])
    elif reference is not None:
        row.logprob_error = logprob_error(own["logprobs"], reference["logprobs"])


def described(engine: EngineStart) -> dict[str, Any]:
    """The start of ``engine``, as plain values."""
    return {
        "variant": engine.variant.label,
        "kind": engine.variant.kind,
        "chunk": engine.chunk,
        "environment": dict(engine.variant.environment),
        "arguments": dict(engine.arguments),
        "traces": [
            {
                "trace": trace.label,
                "requests": len(trace.prompts),
                "prompt_tokens": sum(trace.prompts),
                "output_tokens": sum(trace.outputs),
            }
            for trace in engine.traces
        ],
    }


def _facts(finding: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in finding.items() if name != "traces"}
