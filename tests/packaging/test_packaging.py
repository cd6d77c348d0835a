"""The installed package is the one the sources say it is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"tw_compile": "tw_compile", "passes": "tw_compile.passes", "kernels": "tw_compile.kernels"}
FOLDERS["configs"] = "tw_compile.configs"
MAX_LINES = 600
SOURCE_KINDS = ("*.py", "*.cu", "*.cuh")


def test_links_in_the_package_lead_to_the_source_folders() -> None:
    for name in ("passes", "kernels", "configs"):
        assert (ROOT / "tw_compile" / name).resolve() == ROOT / name


def test_every_folder_of_modules_is_a_package() -> None:
    for folder in FOLDERS:
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def test_the_package_imports_nothing_of_the_tests() -> None:
    """Only from a checkout could it."""
    own = {path.stem for path in (ROOT / "tests").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert {"gpu", "emulator", "conftest"} <= own
    names = re.compile(rf"^\s*(?:from|import) (?:tests|{'|'.join(sorted(own))})\b.*$", re.MULTILINE)
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 200
    assert [(path, line) for path in sources for line in names.findall(path.read_text())] == []


@pytest.mark.parametrize("name", ["passes", "kernels", "configs"])
def test_source_folders_are_not_importable_by_their_own_name(name: str) -> None:
    code = f"import importlib.util; assert importlib.util.find_spec({name!r}) is None"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd="/", timeout=60)


def test_wheel_has_every_source(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("runtime/probe.cuh", "collective/probe.cu"):
        (tmp_path / "kernels" / name).touch()
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], check=True, cwd=tmp_path, timeout=120, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    sources = {
        "/".join([*package.split("."), *path.relative_to(tmp_path / folder).parts])
        for folder, package in FOLDERS.items()
        for kind in SOURCE_KINDS
        for path in (tmp_path / folder).rglob(kind)
    }
    assert {"tw_compile/kernels/runtime/probe.cuh", "tw_compile/kernels/collective/probe.cu"} <= sources
    assert sources <= set(zipfile.ZipFile(wheel).namelist())


def test_sdist_has_what_the_readme_names(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], check=True, cwd=ROOT, capture_output=True, text=True).stdout.split(
        "\n"
    )
    for name in filter(None, tracked):
        if not (ROOT / name).is_dir():  # links in the package
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    for name in ("passes", "kernels", "configs"):
        (tmp_path / "tw_compile" / name).symlink_to(Path("..") / name)
    build = "from setuptools import build_meta; build_meta.build_sdist('.')"
    subprocess.run([sys.executable, "-c", build], check=True, cwd=tmp_path, timeout=120, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    text = (ROOT / "README.md").read_text()
    named = {name for name in re.findall(r"\]\(([\w./-]+)\)", text) if (ROOT / name).is_file()}
    assert {"DESIGN.md", "CONTRIBUTING.md", "benchmarks/README.md"} <= named
    in_package = {name for name in named if name.partition("/")[0] in FOLDERS and not name.startswith("tw_compile/")}
    assert named - in_package | {f"tw_compile/{name}" for name in in_package} <= names
    assert {".ci/run", "tests/conftest.py", "tw_compile/kernels/__init__.py"} <= names


def test_no_file_is_long() -> None:
    folders = [*FOLDERS, "tests", "benchmarks"]
    files = [path for folder in folders for kind in SOURCE_KINDS for path in (ROOT / folder).rglob(kind)]
    long = {
        str(path.relative_to(ROOT)): count
        for path in files
        if (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long
