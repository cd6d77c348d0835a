"""Hooks of mkdocs for pages that live outside ``docs``: they add these pages to the site, and adapt the links between pages.

On disk a page links to ``../benchmarks/x.md`` or, from ``benchmarks``, to ``../docs/x.md``, so that links work where the
repository is read as files. In the site the two folders are merged into one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md")
SUFFIXES = (".md", ".csv", ".json", ".txt", ".png")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root, and ``benchmarks`` with its result files."""
    there = [*PAGES, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "benchmarks").rglob("*")))]
    for name in there:
        if name.endswith(SUFFIXES):
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between ``docs`` and the rest of the repository into links within the site."""
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, source: str) -> str:
    """``markdown`` with its links on disk turned into links within the site.

    ``source`` is the page's place in the site. Links to files that are not in the repository stay as they are.
    """
    folder = Path(source).parent
    on_disk = folder if source in PAGES or source.startswith("benchmarks/") else "docs" / folder

    def mended(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        place = (ROOT / on_disk / target).resolve()
        if not place.is_relative_to(ROOT) or not place.exists():
            return found[0]
        inside = place.relative_to(ROOT)
        if inside.parts[0] == "docs":
            inside = inside.relative_to("docs")
        elif inside == Path("README.md"):
            inside = Path("index.md")
        up = [".."] * len(folder.parts)
        return f"]({'/'.join([*up, *inside.parts])}{anchor})"

    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", mended, markdown)
