"""Times that benchmarks have written as CSV: committed, of ``--from``, and measured here. Imports no torch."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tw_compile.files import read_text
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.wires import EXACT

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
"""The results of a checkout; a wheel has none."""
COMMITTED = (
    "2026-11-21-2xh200-kernel-tp2.csv",
    "2026-11-22-4xh200-kernel-tp4.csv",
    "2026-11-21-2xh200-kernel-tp2-sms.csv",
    "2026-11-22-4xh200-kernel-tp4-stream.csv",
    "2026-11-22-4xh200-kernel-tp4-gated.csv",
    "2026-11-25-2xh100-kernel-tp2-sms.csv",
    "2026-11-26-h100-ffn-llama-3.3-70b-tp4-tuned.csv",
    "2026-11-26-h100-ffn-llama-3.3-70b-tp8-tuned.csv",
    "2026-11-26-4xh100-layer-llama-3.3-70b-tp4.csv",
    "2026-11-26-4xh100-layer-short-llama-3.3-70b-tp4.csv",
    "2026-11-22-4xh200-layer-llama-3.3-70b-8-layers-tp4.csv",
    "2026-11-22-2xh200-layer-llama-3.1-8b-8192-tp2.csv",
    "2026-11-21-2xh200-layer-llama-3.1-8b-tp2.csv",
    "2026-11-28-2xh200-layer-llama-3.3-70b-4-layers-tp2.csv",
    "2026-11-21-2xh200-layer-llama-3.3-70b-tp2-again.csv",
    "2026-11-26-2xh100-layer-paper-llama-3.1-8b-tp2.csv",
    "2026-11-26-2xh100-layer-paper-llama-3.3-70b-tp2.csv",
    "2026-11-25-2xh100-layer-llama-3.1-8b-peers-tp2.csv",
    "2026-11-25-2xh100-layer-llama-3.3-70b-peers-tp2.csv",
    "2026-11-23-2xh200-vllm-llama-3.1-8b-32-layers-8192-tp2.csv",
    "2026-11-22-4xh200-vllm-llama-3.3-70b-tp4.csv",
    "2026-11-25-2xh100-kernel-tp2.csv",
    "2026-11-26-4xh100-kernel-wires-tp4.csv",
    "2026-11-26-2xh200-kernel-wires-tp2.csv",
    "2026-11-26-2xh100-kernel-wires-tp2.csv",
    "2026-11-24-2xh100-kernel-wires-tp2.csv",
    "2026-11-24-2xh100-kernel-host-wires-tp2.csv",
    "2026-11-26-4xh100-kernel-host-tp4.csv",
    "2026-11-25-2xh100-layer-host-llama-3.1-8b-tp2.csv",
    "2026-11-26-2xh100-layer-host-int8-llama-3.1-8b-tp2.csv",
    "2026-11-26-4xh100-layer-host-llama-3.1-8b-8-layers-tp4.csv",
    "2026-11-24-2xh100-layer-host-llama-3.1-8b-1024-tp2.csv",
    "2026-11-24-2xh100-vllm-host-llama-3.1-8b-16-layers-tp2.csv",
)
"""The files that exhibits are drawn from. If two files of the same device have the same value, the first
file's value counts. All their machines have NVLink; some runs left it unused."""
SCHEMAS = {
    "bench vllm": {"label", "trace", "chunk", "requests", "speedup", "world_size", "model"},
    "bench ffn": {"label", "tokens", "p50_us", "world_size", "model", "first"},
    "bench layer": {"label", "kind", "tokens", "p50_us", "world_size", "model", "numerics"},
    "bench kernel": {"label", "kind", "tokens", "p50_us", "world_size", "hidden", "numerics"},
}
"""Columns that a file of each benchmark has at least."""
PEER, OURS = "peer", "ours"
HOST_MEMORY = "host memory"
PEERS_NORM = "rms_norm"


@dataclass(frozen=True)
class Timed:
    """One row of a benchmark.

    Attributes:
        bench: One of ``SCHEMAS``.
        world_size: Ranks; for ``bench ffn``, those among which the weights are divided.
        hidden: The hidden size for ``bench kernel``, else 0; ``model``: the model for the other benchmarks, else empty.
        tokens: Tokens; for ``bench vllm``, those of a step.
        value: Microseconds; for ``bench vllm``, the speed-up.
        trace, requests: For ``bench vllm`` only.
        first: For ``bench ffn``, tokens of the first half; 0 where nothing is split.
        quantises: Whether its results are float8, which no peer gives.
        wire: How its rows travel.
        how: How the value was obtained, see :class:`Point`.
        file, folder, device: Where the row is from, and the device that it was measured on. A file need not name the device.
        through_host: Whether rows went through host memory, because the run did not use the GPUs' peer access, or had none.
    """

    bench: str
    label: str
    kind: str
    world_size: int
    tokens: int
    value: float
    how: str
    file: str
    hidden: int = 0
    model: str = ""
    trace: str = ""
    requests: int = 0
    first: int = 0
    quantises: bool = False
    wire: str = EXACT
    device: str = ""
    through_host: bool = False
    folder: str = ""

    @property
    def run(self) -> str:
        """Folder and file, which all rows of one run share. Files of the same name in two folders are two runs."""
        return str(Path(self.folder, self.file))

    @property
    def link(self) -> str:
        """What rows travelled over. A file from elsewhere does not say whether peers were reached over NVLink or PCIe."""
        if self.through_host:
            return HOST_MEMORY
        return "NVLink" if self.file in COMMITTED else "peer access"

    @property
    def where(self) -> str:
        """The device, and the link where it is host memory; empty where the file says neither."""
        return ", ".join(filter(None, (self.device, HOST_MEMORY if self.through_host else "")))

    @property
    def source(self) -> str:
        """File and device."""
        return f"{self.file}, {self.device}" if self.device else self.file

    @property
    def sms(self) -> int | None:
        """The number that ``--sms`` asked for, which the label ends with."""
        found = re.fullmatch(r".*-(\d+)sm", self.label)
        return None if found is None else int(found[1])


def parse(text: str, file: str, how: str, option: str = "--from") -> list[Timed]:
    """The rows that have a value and the peers' norm and, where results were checked, good results.

    Raises:
        UsageError: The text is no CSV of a benchmark that exhibits are drawn from. The message names ``option`` and ``file``.
    """
    reader = csv.DictReader(io.StringIO(text))
    columns = set(reader.fieldnames or ())
    bench = next((name for name, needed in SCHEMAS.items() if needed <= columns), None)
    if bench is None:
        wanted = "; ".join(f"{name}: {', '.join(sorted(needed))}" for name, needed in SCHEMAS.items())
        got = ", ".join(sorted(columns)[:8]) or "nothing"
        raise UsageError(
            f"{option}: expected a CSV file of a benchmark ({wanted}), got {file!r} with the columns {got}"
        )
    try:
        rows = [_row(bench, row, how, Path(file)) for row in reader]
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option}: expected numbers where {bench} has them, got {file!r} ({error})") from error
    return [row for row in rows if row is not None]


def _row(bench: str, row: dict[str, str], how: str, file: Path) -> Timed | None:
    value = row["speedup" if bench == "bench vllm" else "p50_us"]
    wrong = bench in ("bench kernel", "bench layer") and row["kind"] != "bound" and row["numerics"] != "ok"
    if not value or wrong or row.get("norm", PEERS_NORM) != PEERS_NORM:
        return None
    return Timed(
        bench,
        row["label"],
        row.get("kind") or "",
        int(row["world_size"]),
        int(row["chunk" if bench == "bench vllm" else "tokens"]),
        float(value),
        how,
        file.name,
        int(row.get("hidden") or 0),
        row.get("model") or "",
        row.get("trace") or "",
        int(row.get("requests") or 0),
        int(row.get("first") or 0),
        row.get("quantises") == "True",
        row.get("wire") or EXACT,
        (row.get("device_name") or "").removeprefix("NVIDIA "),
        row.get("peer_access") == "off",
        str(file.parent),
    )


def given(files: Iterable[str]) -> list[Timed]:
    """Rows of the files of ``--from``.

    Raises:
        UsageError: A file can't be read, or is no CSV of a benchmark.
    """
    return [row for file in files for row in parse(text_of(file), file, "measured earlier")]


def text_of(file: str) -> str:
    """What a file of ``--from`` holds; UsageError where it can't be read."""
    try:
        return read_text(Path(file), "--from")
    except ValueError as error:
        raise UsageError(str(error)) from error


def committed() -> list[Timed]:
    """Rows of the files that the checkout has; a wheel has none."""
    files = [RESULTS / name for name in COMMITTED if (RESULTS / name).exists()]
    return [row for file in files for row in parse(file.read_text(), str(file), "measured earlier", "results")]
