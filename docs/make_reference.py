"""Write the pages of ``docs/reference`` from the code.

``python docs/make_reference.py`` writes ``commands.md`` and ``options.md``. ``python docs/make_reference.py json`` runs the
commands that need no GPU, except those in ``ELSEWHERE``, in some minutes, and writes ``json.md`` from their reports. Tests
compare the pages with the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tw_compile import Config
from tw_compile.cli.app import app

FOLDER = Path(__file__).parent / "reference"
MADE = "<!-- made by docs/make_reference.py; do not edit -->\n\n"

QUICK = {
    "plan": ["plan", "--tp", "4", "--tokens", "2048"],
    "explain": ["explain", "--model", "llama-3.3-70b", "--tp", "4", "--tokens", "64,2048"],
    "doctor": ["doctor"],
    "doctor --vllm": ["doctor", "--vllm"],
    "tune --dry-run": ["tune", "--dry-run"],
    "tune --halves --dry-run": ["tune", "--halves", "llama-3.3-70b", "--dry-run"],
    "bench paper": ["bench", "paper", "flash-communication", "--figures", "5,10,13", "--dry-run"],
    "bench vllm --dry-run": ["bench", "vllm", "--dry-run", "--tp", "4"],
}
"""Reports that take seconds."""
SLOW = {
    "run": ["run", "--device", "cpu", "--tp", "2", "--layers", "1", "--tokens", "8,3", "--trace", "trace.json"],
    "inspect": ["inspect", "--model", "tiny-llama", "--tp", "2", "--tokens", "64"],
    "bench passes": ["bench", "passes", "--model", "tiny-llama", "--tp", "2", "--layers", "1,2"],
    "bench beside": ["bench", "beside", "--device", "cpu", "--repeats", "20", "--gemm", "256x512", "--sms", "8"],
    "bench kernel": ["bench", "kernel", "--device", "cpu", "--repeats", "20"],
    "bench layer": ["bench", "layer", "--device", "cpu", "--repeats", "20", "--only", "fused,fused+split"],
    "tune": ["tune", "--device", "cpu", "--fresh"],
}
"""Reports that take up to a minute each. The tests that make such reports compare their keys."""
ELSEWHERE = {
    "bench gemm-site": "The keys are those of `bench layer`.",
    "bench model": "The keys are those of `bench layer`.",
    "bench vllm": "Without `--dry-run` the report needs GPUs and vLLM. A committed one: "
    "[vLLM TP2](../../benchmarks/results/2026-11-23-2xh200-vllm-llama-3.1-8b-32-layers-8192-tp2.json), "
    "commit b0fd917-dirty. Since then engines and rows also have `flashinfer_importable` (true or false) and "
    "`flashinfer_fusion_bytes` (number; 0: FlashInfer's fusion was off), and `versions` has `flashinfer` (text or null).",
}

TYPES = {str: "text", int: "number", float: "number", bool: "true or false", type(None): "null"}


def commands_page() -> str:
    """Every verb with its help and its options."""
    parts = [MADE, "# Commands\n\nAll verbs and options of `tw-compile`, as `--help` has them.\n"]
    for name, command in _verbs(typer.main.get_command(app), ()):
        parts.append(f"\n## tw-compile {' '.join(name)}\n\n{_paragraphs(command.help)}\n")
        parts.append("\n| option | default | meaning |\n|---|---|---|\n")
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                parts.append(_option_row(parameter))
    return "".join(parts)


def options_page() -> str:
    """The fields of Config, their defaults, and what the docstring of Config says about each field."""
    said = _attributes(inspect.getdoc(Config) or "")
    lines = [
        MADE,
        "# Options\n\nThe fields of `tw_compile.Config`. With torch.compile each is a key of `options`: ",
        '`options={"tw_compile.fuse_min_bytes": 65536}`. In vLLM they are the keys of the table `tw_compile` in ',
        '`--additional-config`, in JSON: `true`, `null`, `"auto"`. There, `host` and `disable_custom_all_reduce` follow vLLM.',
        "\n\n",
        "| option | default | meaning |\n|---|---|---|\n",
    ]
    for field in dataclasses.fields(Config):
        default = "`TW_COMPILE_STRICT`" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        lines.append(f"| `{field.name}` | {default} | {_cell(said[field.name])} |\n")
    return "".join(lines)


def json_page(reports: dict[str, dict[str, Any]]) -> str:
    """The keys of each command's report."""
    parts = [
        MADE,
        "# JSON reports\n\nEvery command takes `--json FILE`; `-` is standard output. `schema_version` changes when a key ",
        "changes its meaning. These are the keys of reports that were made on a machine without GPUs. `[]` stands for the ",
        "items of a list, and `<key>` for keys that are data: names, reasons, ranks or numbers. A list that was empty there ",
        "has the type `list` and no keys.\n",
    ]
    for name in sorted([*reports, *ELSEWHERE]):
        parts.append(f"\n## {name}\n\n")
        if name in ELSEWHERE:
            parts.append(ELSEWHERE[name] + "\n")
            continue
        parts.append("| key | type |\n|---|---|\n")
        parts += [f"| `{path}` | {kind} |\n" for path, kind in keys_of(reports[name]).items()]
    return "".join(parts)


def keys_of(report: dict[str, Any]) -> dict[str, str]:
    """Dotted paths of all keys, and the types of their values."""
    found: dict[str, set[str]] = {}
    for path, kind in _walk(report, ""):
        found.setdefault(path, set()).add(kind)
    return {path: " or ".join(sorted(kinds)) for path, kinds in found.items()}


def report_of(arguments: list[str], folder: Path) -> dict[str, Any]:
    """The JSON report of a command that runs in ``folder``, with the user's files out of the way."""
    file = folder / "report.json"
    out = ["--out", str(folder / "tuned")] if arguments[0] == "tune" else []
    variables = os.environ | {"XDG_CONFIG_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tw_compile.cli", *arguments, *out, "--json", str(file)]
    subprocess.run(command, check=False, env=variables, cwd=folder, stdout=subprocess.DEVNULL)  # 1: there is a report
    return json.loads(file.read_text())


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            name = "<key>" if _keys_are_data(path) or not re.fullmatch(r"[a-z_][a-z0-9_]*", key) else key
            yield from _walk(inner, f"{path}.{name}" if path else name)
        if not value and path:
            yield path, "object"
    elif isinstance(value, list):
        if not value:
            yield path, "list"
        for inner in value:
            yield from _walk(inner, f"{path}[]")
    else:
        yield path, TYPES[type(value)]


def _keys_are_data(path: str) -> bool:
    """Whether the keys below ``path`` come from the data, such as names of reasons or of settings."""
    last = path.rpartition(".")[2].removesuffix("[]")
    return last in {"refusals", "joins", "exposed", "reasons", "quantisations", "environment", "medians_us"}


def _verbs(command: Any, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for verb, inner in command.commands.items():
            yield from _verbs(inner, (*name, verb))
    else:
        yield name, command


def _option_row(option: Any) -> str:
    names = "`, `".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {_cell(option.metavar or option.type.name.upper())}"
    shown = option.show_default
    default = option.default
    if isinstance(shown, str):
        text = shown
    elif option.is_flag:
        text = "on" if default else "off"
    else:
        text = "" if default is None else f"`{default}`"
    return f"| `{names}`{value} | {_cell(text)} | {_cell(option.help or '')} |\n"


def _attributes(docstring: str) -> dict[str, str]:
    """``name: text`` of a docstring's section Attributes."""
    section = docstring.partition("Attributes:\n")[2].partition("\nRaises:")[0]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        start = re.fullmatch(r" {4}(\w+): (.*)", line)
        if start is not None:
            name, found[start[1]] = start[1], start[2]
        elif line.strip():
            found[name] += " " + line.strip()
    return {key: text.replace("``", "`") for key, text in found.items()}


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


def _cell(text: str) -> str:
    """Text of one table cell; not for code, in which Markdown has no escapes."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "commands.md").write_text(commands_page())
    (FOLDER / "options.md").write_text(options_page())
    if sys.argv[1:] == ["json"]:
        reports = {}
        for name, arguments in (QUICK | SLOW).items():
            with tempfile.TemporaryDirectory() as folder:
                reports[name] = report_of(arguments, Path(folder))
        (FOLDER / "json.md").write_text(json_page(reports))


if __name__ == "__main__":
    main()
