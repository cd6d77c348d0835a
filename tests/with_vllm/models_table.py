"""Which of vLLM's models are fused and split, or why not: the table of ``docs/reference/vllm-models.md``.

    python tests/with_vllm/models_table.py [--write] [NAME ...]

traces all models, or those whose name contains a ``NAME``, prints their rows, and writes them into the page. It needs vLLM, a C
compiler and no GPU, and takes some ten seconds a model.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import states
from most_used_models import FURTHER, MODELS, QUANTISED, WITH_STATE, Model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from traced_models import Traced

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "vllm-models.md"
SECTIONS = {
    "Most-used models": MODELS,
    "Further models": FURTHER,
    "Mamba and linear attention": WITH_STATE,
    "Quantised weights": QUANTISED,
}
_HEAD = "| model | architecture | sums of a layer fused | split | reason |\n|---|---|---|---|---|\n"
_NOT_TRACED = "not traced"


def row_of(model: Model, traced: Traced) -> str:
    """A line of the table."""
    if traced.refused:
        return _row(model, "no", "no", f"`{traced.refused}`")
    embedding, *layers = traced.reports
    reports = layers if layers or traced.with_state else [embedding]
    if traced.with_state:
        total, fused = (sum(one.counts[what] for one in reports) for what in ("all_reduce", "fused"))
    else:
        total = reports[-1].counts["all_reduce"]
        fused = min(one.counts["fused"] for one in reports) if traced.by_groups else reports[-1].counts["fused"]
    reasons = {str(reason) for one in reports for reason in one.refusals}
    split = embedding.split if traced.with_state else reports[-1].split
    joins = {str(reason) for reason in split.joins} if split is not None else set()
    is_split = split is not None and split.mode != "off"
    if split is not None and not is_split and (fused == total or traced.with_state):
        reasons.add(str(split.reason))
    names = [f"`{one}`" for one in sorted(reasons)]
    if split is None and fused == total:
        names.append("no groups of layers")
    names += [f"{count} inside `{name}`" for name, count in traced.inside.items()]
    halves = "yes" if is_split and not joins else "yes, attention runs once" if is_split else "no"
    return _row(model, f"{fused} of {total}" if total else "no", halves, ", ".join(names))


def _row(model: Model, fused: str, split: str, reason: str) -> str:
    return f"| {model.name} | `{model.architecture}` | {fused} | {split} | {reason} |".replace("|  |", "| |")


def rows_of_page() -> dict[str, str]:
    """The lines of the page's tables, by the model's name."""
    if not PAGE.exists():
        return {}
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]
    return {line.split(" | ")[0][2:]: line for line in lines}


def totals(rows: list[str]) -> tuple[int, int]:
    """How many have all sums of a layer fused, and how many are split."""
    cells = [row.split(" | ") for row in rows]
    fused = [counts[0] == counts[-1] for one in cells if (counts := one[2].split(" of ")) and len(counts) == 2]
    return sum(fused), sum(one[3].startswith("yes") for one in cells)


def page(rows: dict[str, str]) -> str:
    """The page, with the rows that there are."""
    text = _INTRODUCTION
    for title, models in SECTIONS.items():
        found = [rows[model.name] for model in models if model.name in rows]
        fused, split = totals(found)
        text += (
            f"\n## {title}\n\n{len(found)} models: {fused} fused, {split} split.\n\n{_HEAD}" + "\n".join(found) + "\n"
        )
    return text


_INTRODUCTION = """# Models of vLLM

The tables say for each model whether the passes fuse the sums of its layers over two ranks, whether its layers can be split
into two micro-batches, and if not, why. [Troubleshooting](../troubleshooting.md) explains the reasons. "No groups of layers"
means that no norm before attention says where layers begin, so long steps run by pieces, which are not split. "Attention runs
once" means that the micro-batches meet in attention, because no kernel is known that does it for half of the tokens.

vLLM 0.24's own compiler traced a tiny configuration of each model, without a GPU, as groups of layers for steps of up to 2048
tokens. The split was asked for by a number of tokens. So the tables say what is proven to be right, and not where the planner
finds that it pays. Nothing ran. `python tests/with_vllm/models_table.py --write` makes this page, in
[vLLM's environment](../../CONTRIBUTING.md#vllm), and `tests/with_vllm/test_models_table.py` compares it.

With Mamba or linear attention (`state_space`) layers differ within a model. So there the table counts the sums of all layers
of the tiny model, which has each kind at least once. "2 inside `mamba_mixer`" means that this operator does two more sums by
itself, where no pass sees them ([Mamba and linear attention](../vllm.md#mamba-and-linear-attention)).

With `auto` no quantised model and no model with experts of vLLM's is split over NVLink. Their matmuls can't be told to leave
SMs to a sum beside them, and the planner has no times for them ([Splitting](../split.md#quantised-matmuls-and-experts)).
"""


@contextmanager
def node(folder: Path) -> Iterator[None]:
    """vLLM on a fake node of two GPUs, with what models need."""
    for place in (ROOT, ROOT / "tests"):
        sys.path.insert(0, str(place))
    import fake_vllm

    fake_vllm.prepare(folder)
    with models_inspected_here():
        fake_vllm.make_groups(fake_vllm.engine_config(folder))
    with models_here():
        yield


@contextmanager
def models_inspected_here() -> Iterator[None]:
    """vLLM asks a process of its own what a model's class can do, which takes longer than all else here."""
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo

    def inspect(lazy: Any) -> Any:
        return _ModelInfo.from_model_cls(lazy.load_model_cls())

    with mock.patch.object(_LazyRegisteredModel, "inspect_model_cls", inspect):
        yield


@contextmanager
def models_here() -> Iterator[None]:
    """Models with experts have a group for them, here the same; shared ones a stream of their own, which takes a GPU.

    Those whose layers have a state need more (:func:`states.models_here`).
    """
    from vllm.distributed import parallel_state

    with ExitStack() as stack, states.models_here():
        stack.enter_context(mock.patch.object(parallel_state, "_EP", parallel_state._TP))
        for module in ("vllm.utils.torch_utils", "vllm.model_executor.layers.fused_moe.runner.shared_experts"):
            stack.enter_context(mock.patch(f"{module}.aux_stream", lambda: None))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write the rows into the page")
    options = parser.parse_args()
    wanted = [
        model
        for models in SECTIONS.values()
        for model in models
        if not options.names or any(name.lower() in model.name.lower() for name in options.names)
    ]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder, node(Path(folder)):
        from traced_models import NotTracedError, trace

        for number, model in enumerate(wanted, 1):
            begun = time.perf_counter()
            try:
                row = row_of(model, trace(Path(folder), model))
            except NotTracedError as error:
                row = _row(model, _NOT_TRACED, _NOT_TRACED, str(error))
            print(f"{number}/{len(wanted)} {time.perf_counter() - begun:.0f} s {row}", flush=True)
            if options.write:
                PAGE.write_text(page({**rows_of_page(), model.name: row}))


if __name__ == "__main__":
    main()
