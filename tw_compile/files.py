"""Read and write text files: files that users name, files in the user's folders, and our own.

Anything but a regular file is refused: reading a FIFO would wait for ever.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("tw_compile")

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def read_text(path: Path, what: str) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        ValueError: There is no such file; the message begins with ``what``, the argument or variable that names the file.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        text = path.read_text(encoding="utf-8") if kind == stat.S_IFREG else ""
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name that no file can have
        raise ValueError(f"{what}: expected a file that can be read, got {str(path)!r} ({error})") from error
    if kind != stat.S_IFREG:
        raise ValueError(f"{what}: expected a regular file, got {str(path)!r}, {_KINDS.get(kind, 'a device')}")
    return text


def read_if_there(path: Path | None, what: str) -> str | None:
    """As :func:`read_text`, but None where nothing has that name. A folder of that name is refused."""
    try:
        if path is None or not _is_there(path):
            return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{what}: expected a file that can be read, got {str(path)!r} ({error})") from error
    return read_text(path, what)


def write_whole(file: Path, text: str) -> None:
    """Write all of ``text`` or nothing.

    An interrupted write leaves the old file as it was. After two writes at once the file has the whole text of one of them.
    """
    other = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        other.write_text(text, encoding="utf-8")
        other.replace(file)
    except BaseException:
        other.unlink(missing_ok=True)
        raise


def name_of_node(device_name: str, facts: Mapping[str, Any]) -> str:
    """A file name for what was measured on a node: the device's name and a digest of ``facts``, without an ending."""
    words = re.sub("[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return f"{words}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]}"


def keep(folder: Path | None, name: str, text: str, what: str) -> Path | None:
    """Write ``text`` to a file in ``folder``, which need not exist, and return its path.

    Where that fails, one warning says of ``what``, and the result is None. ``folder`` is None where the user has no home.
    """
    if folder is None:
        logger.warning("tw_compile: %s is not kept, as this user has no home", what)
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, text)
    except OSError as error:
        logger.warning("tw_compile: %s is not kept: %s", what, error)
        return None
    return folder / name


def user_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder where ``tw-compile tune`` writes its results, which need not exist; None where the user has no home."""
    if folder := environment.get("XDG_CONFIG_HOME"):
        return Path(folder, "tw_compile")
    try:
        return Path.home() / ".config" / "tw_compile"
    except RuntimeError:
        return None


def user_file(name: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file called ``name`` in the user's config folder, which need not exist; None where the user has no home."""
    folder = user_folder(environment)
    return None if folder is None else folder / name


def _is_there(path: Path) -> bool:
    try:
        path.lstat()  # not stat(), which would not find a symlink without a target
    except (FileNotFoundError, NotADirectoryError):  # XDG_CONFIG_HOME=/dev/null is a way to have no files
        return False
    return True
