"""Draw the pictures of the documentation: ``uv run python docs/make_pictures.py`` writes ``docs/images/*.svg``.

Colours are chosen for white and for dark pages alike: text that stands on the page is mid-grey, text in a box is dark on a
light fill. No font is embedded; every box is wide enough for the usual sans-serif ones.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PAGE_TEXT = "#7a838d"
BOX_TEXT = "#1c2530"
COMPUTE, SECOND, COMMUNICATION, FUSED, NEUTRAL = "#a9cdf5", "#bfe3c0", "#f6b3a6", "#f7d488", "#d5dae0"
FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


class Picture:
    """Shapes of one SVG file, ``width`` x ``height`` user units."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = f'viewBox="0 0 {width} {height}"'
        self._shapes = [f"<title>{escape(title)}</title>"]

    def text(self, x: float, y: float, text: str, *, size: int = 15, bold: bool = False, middle: bool = False) -> None:
        self._text(x, y, text, PAGE_TEXT, size, bold, middle)

    def box(self, x: float, y: float, width: float, height: float, label: str, fill: str) -> None:
        """A box with one line of text for each line of ``label``."""
        self._shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{PAGE_TEXT}"/>'
        )
        lines = label.split("\n")
        first = y + height / 2 + 5 - 8.5 * (len(lines) - 1)
        for index, line in enumerate(lines):
            self._text(x + width / 2, first + 17 * index, line, BOX_TEXT, 14, False, True)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        line = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
        self._shapes.append(f'<line {line} stroke="{PAGE_TEXT}" stroke-width="1.6" marker-end="url(#head)"{dash}/>')

    def write(self, name: str) -> None:
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{PAGE_TEXT}"/></marker></defs>'
        )
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" {self._size} font-family="{FONT}" role="img">'
        (IMAGES / name).write_text("\n".join([svg, head, *self._shapes, "</svg>"]) + "\n")

    def _text(self, x: float, y: float, text: str, fill: str, size: int, bold: bool, middle: bool) -> None:
        style = f'font-size="{size}" fill="{fill}"' + (' font-weight="600"' if bold else "")
        anchor = ' text-anchor="middle"' if middle else ""
        self._shapes.append(f'<text x="{x}" y="{y}" {style}{anchor}>{escape(text)}</text>')


def row(picture: Picture, y: float, boxes: list[tuple[str, int, str]]) -> None:
    """Boxes from left to right, ``(label, width, fill)``, joined by arrows."""
    x = 20
    for index, (label, width, fill) in enumerate(boxes):
        if index:
            picture.arrow(x - 14, y + 27, x - 1, y + 27)
        picture.box(x, y, width, 54, label, fill)
        x += width + 15


def draw_layer() -> None:
    picture = Picture(1000, 545, "A decoder layer before and after tw_compile, and the two lanes of the token split")
    picture.text(20, 28, "Before: one decoder layer on each rank. The GPU waits in every all_reduce.", bold=True)
    norms: list[tuple[str, int, str]] = [
        ("all_reduce", 102, COMMUNICATION),
        ("+ residual", 88, NEUTRAL),
        ("RMSNorm", 88, NEUTRAL),
    ]
    row(picture, 42, [("attention,\no_proj", 110, COMPUTE), *norms, ("gate, up,\ndown", 110, COMPUTE), *norms])

    picture.text(20, 140, "Fused: each group of three is one kernel over symmetric memory.", bold=True)
    fused = ("all_reduce + residual + RMSNorm\none kernel", 260, FUSED)
    row(picture, 154, [("attention,\no_proj", 110, COMPUTE), fused, ("gate, up,\ndown", 110, COMPUTE), fused])

    picture.text(
        20,
        252,
        "Fused and split: two micro-batches of tokens, so one computes while the other's sum travels.",
        bold=True,
    )
    picture.text(20, 300, "compute")
    picture.text(20, 318, "stream", size=13)
    picture.text(20, 380, "side stream,", size=13)
    picture.text(20, 397, "a few SMs", size=13)
    left, step, gap = 118, 172, 4
    lanes = ["attention 1", "attention 2", "MLP 1", "MLP 2", "attention 1"]
    for index, label in enumerate(lanes):
        x = left + step * index
        fill = COMPUTE if label.endswith("1") else SECOND
        picture.box(x, 270, step - gap, 58, label + ("\n(next layer)" if index == 4 else ""), fill)
        if index:
            x_call = x + 2
            before = lanes[index - 1]
            picture.box(x_call, 360, step - 34, 50, f"fused call\nof {before}", FUSED)
            picture.arrow(x - 8, 330, x + 6, 359)
    picture.arrow(left, 440, 985, 440)
    picture.text(left, 462, "time", size=13)
    legend = [
        (COMPUTE, "compute, micro-batch 1 (or all tokens)"),
        (SECOND, "compute, micro-batch 2"),
        (COMMUNICATION, "communication that the GPU waits for"),
        (FUSED, "fused call"),
        (NEUTRAL, "memory-bound kernels"),
    ]
    for index, (fill, label) in enumerate(legend):
        x, y = (20 + 330 * (index % 3), 484 + 28 * (index // 3))
        picture.box(x, y, 22, 18, "", fill)
        picture.text(x + 30, y + 14, label, size=14)
    picture.write("layer.svg")


def draw_graph() -> None:
    picture = Picture(1000, 455, "The way of a graph through tw_compile")
    picture.box(20, 20, 300, 50, 'torch.compile(backend="tw_compile")', NEUTRAL)
    picture.box(350, 20, 300, 50, "a host with a post-grad slot", NEUTRAL)
    picture.box(680, 20, 300, 50, "vLLM's compiler (plugin)", NEUTRAL)
    picture.box(180, 112, 640, 50, "post-grad FX graph: functional, all_reduce + wait_tensor, symbolic sizes", COMPUTE)
    for x in (170, 500, 830):
        picture.arrow(x, 71, min(max(x, 300), 700), 111)
    fusion = ["find a site:\nprove or refuse", "gate:\nby bytes", "choose\ntransport", "residual\nlayout", "rewrite"]
    split = ["find the\ntoken axis", "ask the\nplanner", "make two\nhalves", "order:\nthe weave", "lock\nthe order"]
    y = 200
    for name, labels, fill in (("fusion pass", fusion, FUSED), ("split pass", split, SECOND)):
        picture.text(20, y + 33, name, bold=True)
        for index, label in enumerate(labels):
            x = 140 + 170 * index
            if index:
                picture.arrow(x - 19, y + 28, x - 1, y + 28)
            picture.box(x, y, 150, 56, label, fill)
        y += 90
    picture.arrow(500, 163, 500, 198)
    picture.arrow(500, 257, 500, 288)
    picture.arrow(500, 347, 500, 378)
    picture.box(140, 380, 340, 56, "Inductor's code calls\nstart ... wait_", COMPUTE)
    picture.arrow(481, 408, 519, 408)
    picture.box(520, 380, 460, 56, "transport: p2p | multimem | host | nccl | gloo", COMMUNICATION)
    picture.text(20, 413, "run time", bold=True)
    picture.write("graph.svg")


def draw_data() -> None:
    picture = Picture(1000, 440, "The way of the data through one fused call, two ranks, two-shot")
    picture.text(20, 28, "One fused call at TP2 (two-shot). Each rank owns half of the token rows.", bold=True)
    for rank, y in ((0, 48), (1, 250)):
        picture.text(20, y + 76, f"rank {rank}", bold=True)
        own, other = ("rows 0-3", "rows 4-7") if rank == 0 else ("rows 4-7", "rows 0-3")
        first, second = (own, other) if rank == 0 else (other, own)
        fill = (COMPUTE, NEUTRAL) if rank == 0 else (NEUTRAL, COMPUTE)
        picture.box(100, y, 190, 60, f"partial sums\n{first}", fill[0])
        picture.box(100, y + 64, 190, 60, f"partial sums\n{second}", fill[1])
        picture.text(195, y + 144, "slot: symmetric memory", size=13, middle=True)
        picture.box(400, y + 32, 250, 60, f"sum {own} in float32,\nadd residual, RMSNorm", FUSED)
        picture.box(770, y, 210, 60, f"normalised\n{first}", fill[0])
        picture.box(770, y + 64, 210, 60, f"normalised\n{second}", fill[1])
    picture.arrow(291, 78, 399, 102)
    picture.arrow(291, 280, 399, 128, dashed=True)
    picture.arrow(291, 344, 399, 322)
    picture.arrow(291, 142, 399, 296, dashed=True)
    picture.arrow(651, 102, 769, 78)
    picture.arrow(651, 120, 769, 280, dashed=True)
    picture.arrow(651, 322, 769, 344)
    picture.arrow(651, 304, 769, 142, dashed=True)
    picture.text(345, 424, "1. peers' rows arrive", size=13, middle=True)
    picture.text(525, 424, "2. the owner computes", size=13, middle=True)
    picture.text(715, 424, "3. results go to all ranks", size=13, middle=True)
    picture.text(20, 424, "dashed: over NVLink", size=13)
    picture.write("data.svg")


def draw_host() -> None:
    picture = Picture(1000, 330, "The way of the data between two GPUs without peer access")
    picture.text(
        20,
        28,
        "GPUs without peer access: each rank writes to pinned host memory once, and the other one reads it there.",
        bold=True,
    )
    for rank, x in ((0, 20), (1, 700)):
        picture.box(x, 60, 280, 56, f"GPU {rank}: partial sums", COMPUTE if rank == 0 else SECOND)
        picture.box(x, 236, 280, 60, "sum in rank order, residual,\nRMSNorm: one kernel", FUSED)
        picture.arrow(x + 140, 117, x + 140, 235)
    picture.text(500, 62, "host memory (/dev/shm)", size=13, middle=True)
    picture.box(370, 72, 260, 46, "outbox of rank 0", COMPUTE)
    picture.box(370, 150, 260, 46, "outbox of rank 1", SECOND)
    picture.arrow(301, 88, 369, 92)
    picture.arrow(699, 100, 631, 168)
    picture.arrow(631, 104, 716, 235, dashed=True)
    picture.arrow(369, 182, 284, 235, dashed=True)
    picture.text(20, 322, "solid: stores over PCIe    dashed: loads over PCIe", size=13)
    picture.write("host.svg")


@dataclass(frozen=True)
class Gain:
    """A bar: the speed-ups of the rows of ``files`` (of ``benchmarks/results``) whose columns are ``where``.

    ``tokens``: of each file, the only token count that is drawn; empty for all of them.
    """

    label: str
    fill: str
    files: tuple[str, ...]
    where: tuple[tuple[str, str], ...]
    tokens: tuple[str, ...] = ()

    def speedups(self) -> list[float]:
        found = []
        for file, tokens in zip(self.files, self.tokens or ("",) * len(self.files), strict=True):
            where = (*self.where, ("tokens", tokens)) if tokens else self.where
            rows = csv.DictReader((RESULTS / file).read_text().splitlines())
            found += [
                float(row["speedup"])
                for row in rows
                if row["speedup"] and all(row[column] == value for column, value in where)
            ]
        return found


_BY_DEFAULT, _INT8, _PREFILL = (
    (("label", "fused+split"),),
    (("label", "fused+split-int8"),),
    (("label", "fuse+split"), ("trace", "prefill")),
)
_ON_HOST_TP2 = ("2026-11-28-2xh200-layer-host-llama-3.1-8b-16-layers-1024-4096-tp2.csv",)
_ON_HOST_TP2_SIZES = ("2026-11-28-2xh200-layer-host-llama-3.1-8b-16-layers-sizes-tp2.csv",) * 2
_ON_HOST_TP4 = (
    "2026-11-27-4xh200-layer-host-llama-3.1-8b-32-layers-tp4.csv",
    "2026-11-26-4xh100-layer-host-llama-3.1-8b-8-layers-tp4.csv",
)
GAINS = {
    "with NVLink, against the best unfused layer": (
        Gain("2 H100, Llama-3.3-70B", FUSED, ("2026-11-26-2xh100-layer-paper-llama-3.3-70b-tp2.csv",), _BY_DEFAULT),
        Gain("2 H100, Llama-3.1-8B", FUSED, ("2026-11-26-2xh100-layer-paper-llama-3.1-8b-tp2.csv",), _BY_DEFAULT),
        Gain("4 H100, Llama-3.3-70B", FUSED, ("2026-11-26-4xh100-layer-llama-3.3-70b-tp4.csv",), _BY_DEFAULT),
    ),
    "with peer access switched off, against Inductor + NCCL": (
        Gain("4 H200 and 4 H100, Llama-3.1-8B", COMPUTE, _ON_HOST_TP4, _BY_DEFAULT, ("1024", "4096")),
        Gain("the same, rows in 8 bits", SECOND, _ON_HOST_TP4, _INT8, ("1024", "4096")),
        Gain(
            "2 H200, Llama-3.1-8B",
            COMPUTE,
            (*_ON_HOST_TP2, *_ON_HOST_TP2_SIZES),
            _BY_DEFAULT,
            ("", "2048", "8192"),
        ),
        Gain("the same, rows in 8 bits", SECOND, _ON_HOST_TP2, _INT8),
    ),
    "prefill in vLLM, against vLLM": (
        Gain(
            "2 H100, Llama-3.1-8B",
            FUSED,
            ("2026-11-27-2xh100-vllm-flashinfer-llama-3.1-8b-16-layers-8192-tp2.csv",),
            _PREFILL,
        ),
        Gain(
            "4 H100, Llama-3.3-70B",
            FUSED,
            ("2026-11-26-4xh100-vllm-defaults-llama-3.3-70b-16-layers-tp4.csv",),
            _PREFILL,
        ),
        Gain(
            "2 H100, 8B, peer access off",
            COMPUTE,
            ("2026-11-28-2xh100-vllm-host-llama-3.1-8b-16-layers-tp2.csv",),
            _PREFILL,
        ),
        Gain(
            "the same in FP8",
            COMPUTE,
            ("2026-11-27-2xh100-vllm-host-llama-3.1-8b-fp8-token-16-layers-tp2.csv",),
            _PREFILL,
        ),
    ),
}
"""By what they are compared with. Layers are of prefills of 1024 tokens and more."""


def draw_gains() -> None:
    left, per_unit, step = 290, 290, 30
    height = 78 + sum(44 + step * len(gains) for gains in GAINS.values())
    picture = Picture(
        1000, height, "How many times as fast prefill is with tw_compile, by default and with rows in 8 bits"
    )
    picture.text(20, 28, "Prefill: how many times as fast with tw_compile", bold=True)
    y = 40
    for heading, gains in GAINS.items():
        y += 30
        picture.text(20, y, heading, size=14, bold=True)
        y += 14
        for gain in gains:
            speedups = gain.speedups()
            low, high = min(speedups), max(speedups)
            picture.text(36, y + 17, gain.label, size=14)
            picture.box(left, y, per_unit * (high - 1), step - 8, "", gain.fill)
            text = f"{low:.2f}x" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}x to {high:.2f}x"
            picture.text(left + per_unit * (high - 1) + 10, y + 17, text, size=14)
            y += step
    picture.text(
        left, y + 22, "A bar begins at 1.0x, as fast as without, and ends at the best of the token counts.", size=13
    )
    picture.write("gains.svg")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw_layer()
    draw_graph()
    draw_data()
    draw_host()
    draw_gains()
