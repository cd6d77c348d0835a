"""What tests of HTML pages have in common."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "line", "rect", "circle", "path", "br"}


def assert_tags_are_balanced(page: str) -> None:
    parser = _Balanced()
    parser.feed(page)
    assert parser.open == []


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
