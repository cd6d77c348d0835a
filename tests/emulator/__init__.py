"""Runs the CUDA kernels' source on a CPU: all ranks, CTAs and threads of several launches, in one thread of the system.

A kernel that reaches the machine only through ``primitives.cuh`` and ``wgmma.cuh`` is compiled by g++ with ``TW_EMULATED``
defined. Its threads are fibers, which give way inside primitives; a seeded scheduler decides who runs next, when stores become
visible and when bulk copies move their bytes. A protocol that holds under many seeds has been tested; one that fails is
reproduced by its seed.

Modelled
    Ordinary stores are visible to their own rank at once, to others after any delay, each 32-bit word on its own. A release
    makes visible first what happened before it: by program order, barriers, mbarriers. So does ``fetch_add_gpu``, which is more
    than the hardware promises, and the end of a launch. ``add_relaxed_gpu`` makes its sum visible at once, and nothing else.
    Bulk copies move in pieces, later, in any order. Ranks pause for long. CTAs of a rank start in order of their index, at most
    ``resident`` at a time. Streams overlap; launches of one stream do not, but for programmatic ones, which start when all CTAs
    of the launch before have called ``grid_dependency_launch``. CTAs of a cluster start together. Copies of tiles are swizzled
    by 128 bytes, zero outside of the tensor, and move as bulk copies do, to each CTA on its own; an arrival at another CTA's
    mbarrier may take as long, but not beyond ``cluster_sync``; a word stored to another CTA may take as long, too. A warp's
    matmuls read shared memory and add to registers when they are issued or, if it can be, not before ``wgmma_wait``.
    A sum by a multicast address reads the ranks one after the other, and a store there goes to each on its own.
    Shared memory starts as NaNs. Threads that poll sleep until something that they poll changes. What other kernels of a
    stream do between two launches is told by ``read_behind`` and ``write_behind``.
    Prefetches are noted.
Errors
    Accesses outside of allocations, to private memory of peers or misaligned; bulk copies of data that an ordinary store
    wrote without a barrier or ``fence_proxy_async`` since, or that a bulk copy of another CTA wrote without one in the reader;
    words written to a multicast address and read at another, or the other way round, without ``fence_proxy_alias`` since; lanes
    of a warp that call different collectives; a CTA that ends while bulk copies or arrivals of others use its shared memory;
    misuse of mbarriers; matmuls without ``wgmma_fence``, of what an ordinary store wrote, or that are never waited for;
    deadlock, with who waits where.
Not modelled
    Loads happen in program order and are never stale, so a missing acquire is not found. Data races other than the above show
    only as wrong values. The warps of a warpgroup may issue matmuls apart from each other, and each has its registers without
    ``setmaxnreg``. Tensor maps are those of :func:`tensor_map`. Bulk loads into shared memory that was read before need no
    fence. A loop without a primitive hangs. Accesses through plain pointers are not checked. Warps do not diverge or converge.
    Nothing is known about speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

_HERE = Path(__file__).parent
_PRIMITIVES = _HERE.parents[1] / "kernels" / "runtime"
_COMPILER = ("g++", "-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-w")
_MAX_SHARED_BYTES = 227 * 1024
_MAX_CLUSTER = 8
_TILE_MAP = int.from_bytes(b"tilemap", "big")  # TileMap of machine.h

_ENTRY = """
#include "{source}"
template <class P> static void call(void (*kernel)(P), const void* params) {{
  P aligned;
  __builtin_memcpy(&aligned, params, sizeof(P));
  kernel(aligned);
}}
template <class P> constexpr uint32_t size_of(void (*)(P)) {{ return sizeof(P); }}
extern "C" {{
extern const uint32_t emulated_params_bytes;
const uint32_t emulated_params_bytes = size_of({entry});
void emulated_entry(const void* params) {{ call({entry}, params); }}
}}
"""


class EmulationError(RuntimeError):
    """What a kernel did wrong: primitive, rank, launch, CTA, thread, address."""


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, check=False, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def _built(stem: str, content: str, *command: str, text: str | None = None) -> Path:
    """The file that ``command + ["-o", file]`` makes, kept by the hash of ``content``; safe between processes."""
    folder = Path(tempfile.gettempdir()) / f"tw_compile_emulator_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256("\0".join((*command, content)).encode()).hexdigest()[:24]
    built = folder / f"{stem}_{digest}"
    if not built.exists():
        unfinished = built.with_name(f"{built.name}.{os.getpid()}")
        _run(*command, "-o", str(unfinished), text=text)
        unfinished.rename(built)
    return built


@cache
def _library(source: Path, entry: str, defines: tuple[tuple[str, str], ...], flags: tuple[str, ...]) -> ctypes.CDLL:
    """The machine with one kernel in it; compiled when no earlier run has left it."""
    definitions = [f"-D{name}={value}" for name, value in defines]
    include = ['-DTW_EMULATED="emulator.h"', f"-I{_HERE}", f"-I{_PRIMITIVES}"]
    wrapper = _ENTRY.format(source=source, entry=entry)
    kernel = _run(*_COMPILER, *include, *definitions, "-E", "-x", "c++", "-", text=wrapper)
    machine_text = "".join(path.read_text() for path in sorted(_HERE.iterdir()) if path.suffix in (".h", ".cpp"))
    machine = [
        _built(name, machine_text, *_COMPILER, *flags, "-c", str(_HERE / f"{name}.cpp"))
        for name in ("machine", "driver", "multicast", "tiles")
    ]
    command = (*_COMPILER, "-shared", "-Wl,-Bsymbolic", "-x", "c++", "-", "-x", "none", *map(str, machine))
    without_paths = re.sub(r"(?m)^# .*\n", "", kernel)  # copies of a source in other folders are the same
    library = ctypes.CDLL(str(_built(entry, without_paths, *command, text=kernel)))
    library.emulator_create.restype = ctypes.c_void_p
    library.emulator_alloc.restype = ctypes.c_bool
    library.emulator_behind.restype = ctypes.c_bool
    library.emulator_run.restype = ctypes.c_int64
    library.emulator_error.restype = ctypes.c_char_p
    return library


def tensor_map(address: int, rows: int, columns: int, row_bytes: int, box_rows: int, box_columns: int) -> bytes:
    """What a kernel's ``TensorMap`` holds here: ``[rows, columns]`` of 16 bits, boxes swizzled by 128 bytes."""
    words = (address, columns, rows, row_bytes, box_columns, box_rows, _TILE_MAP)
    return bytes((ctypes.c_uint64 * 16)(*words))


class Emulator:
    """``world_size`` ranks that run the kernel ``entry`` of ``source``, which includes ``primitives.cuh`` or ``wgmma.cuh``.

    ``defines`` become ``-D`` options. The same ``seed`` gives the same run. At most ``resident`` CTAs of a rank run at a time.
    After ``stall_limit`` thread switches in which nothing happened but polling, the run is called a deadlock. ``portable``
    switches threads by ucontext, as on machines other than x86-64. After an error the emulator is of no more use.
    """

    def __init__(
        self,
        source: Path,
        entry: str,
        world_size: int,
        seed: int,
        *,
        defines: Mapping[str, object] = MappingProxyType({}),
        resident: int = 16,
        stall_limit: int = 1_000_000,
        portable: bool = False,
    ) -> None:
        if not 1 <= world_size <= 64:
            raise ValueError(f"world_size: expected 1..64, got {world_size}")
        if resident < 1:
            raise ValueError(f"resident: expected at least 1, got {resident}")
        values = tuple(sorted((name, str(value)) for name, value in defines.items()))
        self.world_size, self._resident = world_size, resident
        self._library = _library(source.resolve(), entry, values, ("-DTW_EMULATOR_UCONTEXT",) * portable)
        self._machine = ctypes.c_void_p(
            self._library.emulator_create(world_size, ctypes.c_uint64(seed), resident, ctypes.c_uint64(stall_limit))
        )
        self._buffers: list[torch.Tensor | np.ndarray] = []

    def __del__(self) -> None:
        if hasattr(self, "_machine"):
            self._library.emulator_destroy(self._machine)

    def alloc(self, rank: int, buffer: torch.Tensor | np.ndarray, *, symmetric: bool = False, name: str = "") -> int:
        """Lets kernels access a contiguous ``buffer`` of ``rank``, those of peers too if ``symmetric``; returns its address.

        ``name`` is what errors call it. ValueError when it is not contiguous or overlaps another one.
        """
        self._check_rank(rank)
        if isinstance(buffer, torch.Tensor):
            contiguous, address, size = buffer.is_contiguous(), buffer.data_ptr(), buffer.nbytes
        else:
            contiguous, address, size = buffer.flags.c_contiguous, buffer.ctypes.data, buffer.nbytes
        if not contiguous or size == 0 or address % 4:
            raise ValueError(f"buffer: expected a contiguous one, not empty, got shape {tuple(buffer.shape)}")
        label = (name or f"allocation {len(self._buffers)}").encode()
        arguments = ctypes.c_void_p(address), ctypes.c_size_t(size), symmetric, label
        if not self._library.emulator_alloc(self._machine, rank, *arguments):
            raise ValueError(f"buffer: expected memory of its own, got one that overlaps another: {label.decode()}")
        self._buffers.append(buffer)
        return address

    def multicast(self, parts: Sequence[torch.Tensor]) -> int:
        """An address that stands for the memory of all ranks at once; ``parts``: by rank, of one size, given to ``alloc``."""
        sizes = {part.nbytes for part in parts}
        if len(parts) != self.world_size or len(sizes) != 1:
            raise ValueError(
                f"parts: expected {self.world_size} of one size, got {len(parts)} of {sorted(sizes)} bytes"
            )
        addresses = torch.empty(sizes.pop(), dtype=torch.uint8)  # nothing lies there: ordinary accesses are errors
        pointers = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        base, size = ctypes.c_void_p(addresses.data_ptr()), ctypes.c_size_t(addresses.nbytes)
        self._library.emulator_multicast(self._machine, base, size, pointers)
        self._buffers += [addresses, *parts]
        return addresses.data_ptr()

    def launch(
        self,
        rank: int,
        stream: int,
        grid: int,
        block: int,
        shared_bytes: int,
        params: bytes | ctypes.Structure,
        *,
        cluster: int = 1,
        programmatic: bool = False,
    ) -> int:
        """Queues a launch behind those of the same rank and stream, returns its number.

        ``cluster``: CTAs of a cluster, which start together. ``programmatic`` allows it to start before those launches end.
        """
        self._check_rank(rank)
        if not 1 <= cluster <= min(self._resident, _MAX_CLUSTER):
            raise ValueError(f"cluster: expected 1..{min(self._resident, _MAX_CLUSTER)}, got {cluster}")
        if grid < 1 or grid % cluster:
            raise ValueError(f"grid: expected at least 1 and a multiple of {cluster}, got {grid}")
        if block % 32 or not 32 <= block <= 1024:
            raise ValueError(f"block: expected a multiple of 32 in 32..1024, got {block}")
        if not 0 <= shared_bytes <= _MAX_SHARED_BYTES:
            raise ValueError(f"shared_bytes: expected 0..{_MAX_SHARED_BYTES}, got {shared_bytes}")
        expected = self._library.emulator_params_bytes()
        if len(bytes(params)) != expected:
            raise ValueError(f"params: expected the kernel's {expected} bytes, got {len(bytes(params))}")
        arguments = rank, stream, grid, cluster, block, shared_bytes, bytes(params), programmatic
        return int(self._library.emulator_launch(self._machine, *arguments))

    def read_behind(self, launch: int, address: int, values: torch.Tensor) -> None:
        """``values`` becomes what a kernel right behind the launch reads at ``address``."""
        self._access_behind(launch, address, values, False)

    def write_behind(self, launch: int, address: int, values: torch.Tensor) -> None:
        """A kernel right behind the launch, and before the next of its stream, writes ``values`` to ``address``."""
        self._access_behind(launch, address, values, True)

    def _access_behind(self, launch: int, address: int, values: torch.Tensor, writes: bool) -> None:
        arguments = ctypes.c_void_p(address), ctypes.c_void_p(values.data_ptr()), values.nbytes, writes
        if not self._library.emulator_behind(self._machine, launch, *arguments):
            raise ValueError(f"address: expected {values.nbytes} bytes of a buffer, got {address:#x}")
        self._buffers.append(values)

    def prefetches(self) -> list[tuple[int, int, int]]:
        """Rank, address and bytes of each prefetch that was made."""
        count = self._library.emulator_prefetches(self._machine, None, 0)
        found = (ctypes.c_uint64 * 3 * count)()
        self._library.emulator_prefetches(self._machine, found, count)
        return [(rank, address, size) for rank, address, size in found]

    def run(self) -> int:
        """Runs all queued launches of all ranks to their end; returns thread switches. EmulationError says what went wrong."""
        switches = self._library.emulator_run(self._machine)
        if switches < 0:
            raise EmulationError(self._library.emulator_error(self._machine).decode())
        return switches

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: expected 0..{self.world_size - 1}, got {rank}")
