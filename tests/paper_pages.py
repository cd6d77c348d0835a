"""Read a page of ``tw-compile bench paper`` as an HTML parser sees it, and measure it in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURE = """<script>
const box = element => element.getBoundingClientRect();
const found = {
  wide: document.documentElement.scrollWidth,
  window: innerWidth,
  exhibits: [...document.querySelectorAll('section')].map(section => ({
    id: section.id,
    lines: [...section.querySelectorAll('figure > svg .line')].filter(line => box(line).width > 0).length,
    dots: [...section.querySelectorAll('figure > svg circle')].filter(dot => box(dot).width > 0).length,
    cut: [...section.querySelectorAll('figure > svg text')].filter(text => {
      const drawing = box(text.ownerSVGElement);
      return box(text).left < drawing.left - 1 || box(text).right > drawing.right + 1;
    }).map(text => text.textContent),
  })),
};
document.body.innerHTML = '<pre id="found"></pre>';
document.getElementById('found').textContent = JSON.stringify(found);
</script>"""
"""What a browser makes of the page: drawn lines and dots of each exhibit, and names that are cut off."""


@dataclass
class Shown:
    """One exhibit: points of its lines by their kind (``paper``, ``ours``, ``predicted``), what dots say, and rows of its first
    table."""

    lines: dict[str, list[list[tuple[float, float]]]] = field(default_factory=dict)
    dots: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    @property
    def sides(self) -> set[str]:
        """Those that have a line with a point."""
        return {"paper" if kind == "paper" else "ours" for kind, lines in self.lines.items() if any(lines)}


def read_exhibits(page: str) -> dict[str, Shown]:
    """By the id of the exhibit."""
    reader = _Reader()
    reader.feed(page)
    return reader.exhibits


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.exhibits: dict[str, Shown] = {}
        self._shown = Shown()
        self._tables = 0
        self._into: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "section":
            self._shown = self.exhibits.setdefault(values["id"].removeprefix("exhibit-"), Shown())
            self._tables = 0
        elif tag == "table":
            self._tables += 1
        elif tag == "polyline":
            points = [tuple(map(float, point.split(","))) for point in values["points"].split()]
            kind = values["class"].removeprefix("line ")
            self._shown.lines.setdefault(kind, []).append([(x, y) for x, y in points])
        elif tag == "title":
            self._into = self._shown.dots
        elif tag == "tr" and self._tables == 1:
            self._shown.rows.append([])
        elif tag == "td" and self._tables == 1:
            self._into = self._shown.rows[-1]
        else:
            return
        if tag in ("title", "td") and self._into is not None:
            self._into.append("")

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into[-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("title", "td"):
            self._into = None


def measure_in_browser(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """What ``MEASURE`` finds in a window of this width."""
    copy = folder / "measured.html"
    copy.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},1600", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:]
    return dict(json.loads(html.unescape(found[1])))
