"""Text of the files that users name, or that are theirs or ours, read and written.

What is no regular file is refused: reading a FIFO would wait for ever.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def read_text(path: Path, what: str) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        ValueError: There is none; the message begins with ``what``, the argument or variable that names it.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            raise ValueError(f"{what}: expected a regular file, got {str(path)!r}, {_KINDS.get(kind, 'a device')}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{what}: expected a file that can be read, got {str(path)!r} ({error})") from error


def read_if_there(path: Path | None, what: str) -> str | None:
    """As :func:`read_text`; None where nothing has that name. A folder there is something, and is refused."""
    try:
        if path is None or not _is_there(path):
            return None
    except OSError as error:
        raise ValueError(f"{what}: expected a file that can be read, got {str(path)!r} ({error})") from error
    return read_text(path, what)


def write_whole(file: Path, text: str) -> None:
    """All of it or nothing: an interruption leaves what was there, and of two writers at once one's text is whole."""
    other = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        other.write_text(text, encoding="utf-8")
        other.replace(file)
    except BaseException:
        other.unlink(missing_ok=True)
        raise


def user_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where ``tw-compile tune`` writes what it measured; it need not exist. None without a home."""
    if folder := environment.get("XDG_CONFIG_HOME"):
        return Path(folder, "tw_compile")
    try:
        return Path.home() / ".config" / "tw_compile"
    except RuntimeError:
        return None


def user_file(name: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file called ``name`` in the user's config folder, which need not exist; None without a home."""
    folder = user_folder(environment)
    return None if folder is None else folder / name


def _is_there(path: Path) -> bool:
    try:
        path.lstat()  # of a link, so that one to nowhere is not taken for nothing
    except (FileNotFoundError, NotADirectoryError):  # XDG_CONFIG_HOME=/dev/null is a way to have no files
        return False
    return True
