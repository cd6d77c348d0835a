"""``tw-compile run --wire ... --text ...``: what a wire costs a real model, in nats for each token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tw_compile.cli import common
from tw_compile.files import read_text
from tw_compile.gating.wire_accuracy import BUDGET_NATS
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.wires import WIRES

MAX_DNLL = BUDGET_NATS
WORLD_SIZES = (2, 4)
TEXT_TOKENS = 3072


@dataclass(frozen=True)
class WireCostOptions:
    """The options of ``tw-compile run`` that ``--text`` uses. An option is None where it was not given."""

    wire: str
    wire_sites: str
    text: str | None
    checkpoint: str | None
    text_tokens: int
    max_dnll: float
    tp: int | None


def text_of(file: str) -> str:
    """The content of the file that ``--text`` names. Raises UsageError where the file can't be read."""
    try:
        return read_text(Path(file), "--text")
    except ValueError as error:
        raise UsageError(str(error)) from error


def show_cost(options: WireCostOptions, json_file: str | None) -> int:
    """Measure the cost of a wire, print it and write the report. Returns the exit code.

    Raises:
        UsageError: An option has a value that makes no sense here.
    """
    if options.text is None or options.checkpoint is None:
        raise UsageError("--text: expected it and --checkpoint together, got one of them")
    if options.wire not in WIRES or options.wire == "exact":
        raise UsageError(f"--wire: expected int8 or int6 with --text, got {options.wire!r}")
    common.positive("--text-tokens", options.text_tokens)
    if not options.max_dnll >= 0:
        raise UsageError(f"--max-dnll: expected 0 nats or more, got {options.max_dnll}")
    common.ranks("--tp", options.tp, least=2)
    text = text_of(options.text)
    console = common.make_console(json_file)
    with common.stages(console) as progress:
        progress("importing torch and transformers")
        from tw_compile.runner.accuracy import cost_of_wire, load_checkpoint, pieces_of

        progress(f"reading {options.checkpoint}")
        model, tokenizer = load_checkpoint(options.checkpoint)
        pieces = pieces_of(text, tokenizer, options.text_tokens)
        costs = [
            cost_of_wire(model, pieces, ranks, options.wire, options.wire_sites, progress=progress)
            for ranks in ((options.tp,) if options.tp is not None else WORLD_SIZES)
        ]
    for cost in costs:
        verdict = "within" if cost.added_nats <= options.max_dnll else "BEYOND"
        console.print(
            f"{cost.world_size} ranks, {options.wire}: {cost.added_nats:+.4f} +- {cost.standard_error:.4f} nats a token over "
            f"{cost.exact_nats:.4f} with exact rows, {cost.tokens} tokens: {verdict} {options.max_dnll}",
            markup=False,
        )
    passed = all(cost.added_nats <= options.max_dnll for cost in costs)
    report = {
        "schema_version": 1,
        "command": "run",
        "wire": options.wire,
        "wire_sites": options.wire_sites,
        "checkpoint": options.checkpoint,
        "text": options.text,
        "max_dnll": options.max_dnll,
        "costs": [asdict(cost) | {"added_nats": cost.added_nats} for cost in costs],
        "passed": passed,
    }
    common.write_json(report, json_file)
    return 0 if passed else common.EXIT_FAILED
