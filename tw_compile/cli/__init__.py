"""The command line, ``tw-compile``. Importing it imports neither torch nor transformers."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from tw_compile.cli.app import app

    app()
