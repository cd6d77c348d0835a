"""CUDA C++ sources compiled to cubins with NVRTC, and kept on disk.

Conventions of a source file ``name.cu``:

- one entry, ``extern "C" __global__ void name(const __grid_constant__ Params params)``;
- ``Params`` has the same name and the same fields as the :class:`ctypes.Structure` that Python passes: names, offsets and
  sizes are checked when the source is compiled;
- variants are made by preprocessor definitions;
- it includes only the ``*.cuh`` of this folder, as ``#include "name.cuh"``. C++ and CUDA headers are not available;
- functions without an execution space are ``__device__``.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal

from tw_compile.environment import cache_dir
from tw_compile.kernels.runtime import bindings

logger = logging.getLogger("tw_compile")

HEADERS = Path(__file__).parent
_OPTIONS = ("-std=c++17", "-lineinfo", "-default-device", "-no-source-include")
_DIGEST_BYTES = hashlib.sha256().digest_size
_ARCHITECTURE_SPECIFIC = ((9, 0), (10, 0), (10, 3))
FULL_SHARED_BYTES = 227 * 1024
"""The most shared memory that a CTA can have on devices whose major compute capability is in ``FULL_SHARED_MAJORS``."""
FULL_SHARED_MAJORS = (9, 10)

cubins_in_memory: dict[str, bytes] = {}
_MOST_THREADS = 8
"""At most so many on each rank, as all ranks of a node compile at the same time."""


def arch_of(capability: tuple[int, int]) -> str:
    """NVRTC's name for a compute capability. ``(9, 0)`` is sm_90a, with the instructions that only this capability has."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if capability in _ARCHITECTURE_SPECIFIC else ''}"


def cache_folder() -> Path | None:
    """Where cubins are kept: TW_COMPILE_CACHE_DIR, else tw_compile in the user's cache folder; None without a home."""
    if chosen := cache_dir():
        return chosen
    if user_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_cache, "tw_compile")
    try:
        return Path.home() / ".cache" / "tw_compile"
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Program:
    """One variant of a source file for one architecture (see :func:`arch_of`).

    ``headers``: files that the source may include besides those of this folder.
    """

    source: Path
    params: type[ctypes.Structure]
    arch: str
    defines: tuple[tuple[str, int | str], ...] = ()
    headers: tuple[Path, ...] = ()

    @property
    def entry(self) -> str:
        """The kernel's name."""
        return self.source.stem

    def cubin(self) -> bytes:
        """The machine code, from memory, from disk or freshly compiled; RuntimeError with NVRTC's log if compilation fails.

        Any number of processes may call this at once. A damaged file on disk is compiled again and replaced. If the folder
        can't be written to, every process has to compile.
        """
        unit = self._unit()
        key = unit.key()
        if key in cubins_in_memory:
            return cubins_in_memory[key]
        folder = cache_folder()
        path = None if folder is None else folder / f"{key}.cubin"
        cubin = None if path is None else _read(path)
        if cubin is None:
            begin = time.perf_counter()
            cubin = unit.compile("CUBIN")
            logger.debug("compiled %s for %s in %.2f s", self.source.name, self.arch, time.perf_counter() - begin)
            if path is not None:
                _write(path, cubin)
        cubins_in_memory[key] = cubin
        return cubin

    def ptx(self) -> str:
        """The PTX that the machine code is made from; compiled on every call."""
        return self._unit().compile("PTX").rstrip(b"\0").decode()

    def _unit(self) -> _Unit:
        text = self.source.read_bytes() + b"\n" + layout_checks(self.params).encode()
        headers = {path.name: path.read_bytes() for path in sorted({*HEADERS.glob("*.cuh"), *self.headers})}
        # True as text would be an identifier to the preprocessor, and so 0.
        values = [(name, int(value) if isinstance(value, bool) else value) for name, value in self.defines]
        defines = (f"-D{name}={value}" for name, value in values)
        return _Unit(str(self.source), text, headers, (f"--gpu-architecture={self.arch}", *_OPTIONS, *defines))


def compile_all(programs: Iterable[Program]) -> None:
    """Compile the programs at the same time, so that :meth:`Program.cubin` has their machine code. Loads nothing.

    A first start on a machine has dozens of variants to compile, each in a fraction of a second. NVRTC runs without Python's
    lock.

    Raises:
        RuntimeError: A program does not compile; with NVRTC's log.
    """
    distinct = list(dict.fromkeys(programs))
    if len(distinct) < 2:
        return  # who needs it compiles it
    with ThreadPoolExecutor(min(len(distinct), len(os.sched_getaffinity(0)), _MOST_THREADS)) as pool:
        for _ in pool.map(Program.cubin, distinct):
            pass


def layout_checks(params: type[ctypes.Structure]) -> str:
    """C++ that compiles only if the C++ struct with the name of ``params`` has the same size, fields, offsets and sizes."""
    name = params.__name__
    facts = [("size in bytes", f"sizeof({name})", ctypes.sizeof(params))]
    for field in params._fields_:
        layout = getattr(params, field[0])
        # NVRTC has no offsetof. This is the compiler front end's intrinsic behind offsetof.
        offset = f"__INTADDR__(&(({name}*)0)->{field[0]})"
        facts.append((f"offset of {field[0]}", offset, layout.offset))
        facts.append((f"size of {field[0]}", f"sizeof({name}::{field[0]})", layout.size))
    checks = [
        f'static_assert({found} == {expected}, "{name} in Python: {what} is {expected}");'
        for what, found, expected in facts
    ]
    # The checks above would miss an additional field in padding. A structured binding must name all fields.
    count = len(params._fields_)
    fields = ", ".join(f"field_{index}" for index in range(count))
    binding = f"[[maybe_unused]] auto& [{fields}] = params;"
    checks.append(f"inline void python_has_{count}_fields({name}& params) {{ {binding} }}")
    return "\n".join(checks) + "\n"


@dataclass(frozen=True)
class _Unit:
    """All input of NVRTC: compilation reads no other file. ``headers``: the texts of headers by the name in ``#include``."""

    name: str
    text: bytes
    headers: dict[str, bytes]
    options: tuple[str, ...]

    def key(self) -> str:
        """A file name that is a digest of everything that the machine code depends on."""
        version = bindings.call(bindings.load("nvrtc").nvrtcVersion, where="NVRTC")
        return hashlib.sha256(repr((version, self.options, self.text, self.headers)).encode()).hexdigest()

    def compile(self, output: Literal["CUBIN", "PTX"]) -> bytes:
        nvrtc = bindings.load("nvrtc")
        where = f"NVRTC, {self.name}"
        names = [name.encode() for name in self.headers]
        texts = list(self.headers.values())
        program = bindings.call(
            nvrtc.nvrtcCreateProgram, self.text, self.name.encode(), len(names), texts, names, where=where
        )
        try:
            options = [option.encode() for option in self.options]
            (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
            log = bytearray(bindings.call(nvrtc.nvrtcGetProgramLogSize, program, where=where))
            bindings.call(nvrtc.nvrtcGetProgramLog, program, log, where=where)
            text = log.rstrip(b"\0").decode(errors="replace")
            if code:
                raise RuntimeError(f"{where}: {code.name} with {' '.join(self.options)}\n{text}")
            if text:
                logger.debug("%s: %s", where, text)
            result = bytearray(bindings.call(getattr(nvrtc, f"nvrtcGet{output}Size"), program, where=where))
            bindings.call(getattr(nvrtc, f"nvrtcGet{output}"), program, result, where=where)
            return bytes(result)
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def _read(path: Path) -> bytes | None:
    """The cubin in ``path``; None if there is no file, or if its content is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> None:
    """Replace ``path`` as a whole, so that no process ever reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                file.write(hashlib.sha256(cubin).digest() + cubin)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        logger.debug("the machine code is not kept on disk: %s", error)
