"""Start the engines of a benchmark one after the other and put what they found into a report. Imports no vLLM."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tw_compile.benchmark.run import MULTICAST_OFF, multicast_off
from tw_compile.benchmark.vllm.results import SCHEMA_VERSION, VllmRow, compare, judge, measure
from tw_compile.benchmark.vllm.spec import Engine, VllmSpec, engines, job, traces
from tw_compile.runner.machine import installed_version, nccl_version
from tw_compile.runner.spec import UsageError
from tw_compile.runner.versions import versions

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TW_COMPILE_CACHE_DIR")
"""Empty for every engine, so that starts can be compared."""
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def require_vllm() -> None:
    """UsageError where there is none."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("bench vllm: expected vLLM to be installed beside tw_compile, got an environment without it")


def write_model(spec: VllmSpec, folder: Path) -> Any:
    """``config.json`` in ``folder``, cut to so many layers; returns transformers' configuration.

    Raises:
        UsageError: There is no such model, or it has too few layers or positions.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tw_compile.models.config import load_config, truncate_layers

    try:
        config = load_config(spec.model)
    except ValueError as error:
        raise UsageError(f"--model {spec.model}: {error}") from error
    if spec.layers is not None:
        if spec.layers > config.num_hidden_layers:
            raise UsageError(
                f"--layers: expected at most {config.num_hidden_layers}, the layers of {spec.model}, got {spec.layers}"
            )
        config = truncate_layers(config, spec.layers)
    longest = max((trace.longest for chunk in spec.chunks for trace in traces(spec, chunk)), default=0)
    if longest > config.max_position_embeddings:
        raise UsageError(
            f"--prompt-tokens, --requests, --decode-tokens: expected at most {config.max_position_embeddings} tokens of a "
            f"request, the positions of {spec.model}, got {longest}"
        )
    if not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return config


def run(spec: VllmSpec, progress: Callable[[str], None], logs: str | None = None) -> dict[str, Any]:
    """The whole benchmark, as plain values; an engine that fails is a row with the reason.

    ``logs``: a folder to keep the engines' output in.

    Raises:
        UsageError: ``spec`` names a model or variants that are not there.
    """
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tw_compile_") as scratch, multicast_off():
        folder = Path(scratch) / "model"
        config = write_model(spec, folder)
        plan = engines(spec, str(folder))
        for number, engine in enumerate(plan):
            progress(f"{engine.name}: {', '.join(trace.label for trace in engine.traces)}")
            place = Path(scratch) / str(number)
            place.mkdir()
            log = (Path(logs) if logs else place) / f"{engine.variant.label}-{engine.chunk}.log"
            found.append(_start(job(engine, spec, config.vocab_size), engine, place, log, spec.timeout))
        environment = {name: os.environ[name] for name in MULTICAST_OFF}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "bench vllm",
        "machine": f"{platform.machine()} {os.cpu_count()} cpus",
        "device_name": next((one["device_name"] for one in found if "device_name" in one), None),
        "model": spec.model,
        "world_size": spec.world_size,
        "dtype": spec.dtype,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "repeats": spec.repeats,
        "seed": spec.seed,
        "environment": environment,
        "engines": [described(engine) | _facts(one) for engine, one in zip(plan, found, strict=True)],
        "rows": [asdict(row) for row in rows(plan, found)],
        "versions": {**versions(), "vllm": installed_version("vllm"), "nccl": nccl_version()},
    }


def rows(plan: list[Engine], found: list[dict[str, Any]]) -> list[VllmRow]:
    """A row for every engine and trace; ``found`` is what the engines of ``plan`` found, or their ``error``."""
    result = []
    for engine, one in zip(plan, found, strict=True):
        baseline = next(
            (
                other
                for some, other in zip(plan, found, strict=True)
                if some.chunk == engine.chunk and some.variant.kind == "baseline" and "error" not in other
            ),
            None,
        )
        for index, trace in enumerate(engine.traces):
            row = VllmRow(engine.variant.label, engine.variant.kind, trace.kind, engine.chunk, len(trace.prompts))
            result.append(row)
            if "error" in one:
                row.reason = one["error"]
                continue
            row.startup_s, row.compile_s, row.peak_bytes = (
                one[name] for name in ("startup_seconds", "compile_seconds", "peak_bytes")
            )
            measure(row, trace, one["traces"][index]["rounds"])
            if baseline is not None and baseline is not one:
                tokens, others = (some["traces"][index]["tokens"] for some in (one, baseline))
                row.compared, row.differing = compare(tokens, others)
    judge(result)
    return result


def described(engine: Engine) -> dict[str, Any]:
    """What would be started."""
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


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "traces"}


def _start(job: dict[str, Any], engine: Engine, place: Path, log: Path, timeout: float) -> dict[str, Any]:
    """Run one engine in processes of its own; what it found, or its ``error``, and the ``lines`` that are ours."""
    (place / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, **_ENVIRONMENT, **engine.variant.environment}
    environment |= {name: str(place / name.lower()) for name in CACHES}
    arguments = [str(place / "job.json"), str(place / "result.json")]
    command = [sys.executable, "-m", "tw_compile.benchmark.vllm.engine", *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout)
            failure = None if code == 0 else f"vLLM ended with {code}"
        except subprocess.TimeoutExpired:
            failure = f"not finished after {timeout:.0f} s"
        finally:  # also what the engine has left behind, which would hold GPUs' memory
            _end(process)
    lines = log.read_text(errors="replace").splitlines()
    ours = {"lines": list(dict.fromkeys(_own(line) for line in lines if "tw_compile: " in line))}
    if failure is not None:
        return ours | {"error": f"{failure}: {' ... '.join(_errors(lines))}"}
    found = json.loads((place / "result.json").read_text()) | ours
    if found["passes"] != (engine.variant.kind == "ours"):
        said = "; ".join(ours["lines"]) or "and said nothing"
        return ours | {"error": f"vLLM ran {'with' if found['passes'] else 'without'} the passes: {said}"}
    return found


def _errors(lines: list[str]) -> list[str]:
    """The first line that names an error, which is its cause, and the last; without any the last line."""
    named = [line.strip() for line in lines if re.search(r"\w(Error|Exception): ", line)] or lines[-1:]
    return list(dict.fromkeys((*named[:1], *named[-1:])))


def _own(line: str) -> str:
    return line[line.index("tw_compile: ") + len("tw_compile: ") :]


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
