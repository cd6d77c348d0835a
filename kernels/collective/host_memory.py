"""Pinned host memory that the ranks of a node share. GPUs without peer access can all reach it.

Each rank makes a file of its own in /dev/shm for each buffer, and allocates all its pages. So a full /dev/shm is found here,
and not by a signal later. The rank that writes a page also allocates it, so the page is near that rank's GPU if the process is
bound to a socket. Every rank maps the files of all ranks and registers them with CUDA, which pins them and gives them device
addresses. The files are unlinked as soon as all ranks have them open. So nothing is left in /dev/shm, however a process ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from tw_compile.agree import gather
from tw_compile.kernels.collective.slot import GroupState, Shared, SlotMemory
from tw_compile.kernels.runtime import bindings

FOLDER = Path("/dev/shm")
_PAGE = 64 * 1024
_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


def register(address: int, nbytes: int) -> int:
    """Pin memory of this process and map it for the current device. Returns the device address.

    RuntimeError if CUDA refuses.
    """
    try:
        # This uses the runtime API because the runtime gives the thread a context.
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED)))
    except RuntimeError as error:
        # The CUDA runtime remembers the error, and the check behind this thread's next launch would raise it. A launch here
        # takes it away.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"host memory: cannot be registered with CUDA: {error}") from error
    driver = bindings.load("driver")
    return int(bindings.call(driver.cuMemHostGetDevicePointer, address, 0, where="host memory"))


def unregister(address: int) -> None:
    """Undo :func:`register`. If the driver is gone already, as at the end of a process, the driver has done it itself."""
    torch.cuda.cudart().cudaHostUnregister(address)


class _Mapping(mmap.mmap):
    """The mapping of a file. It is unregistered from CUDA before it is unmapped: another mapping may get the same addresses."""

    registered: int | None = None
    unregister: Callable[[int], None]

    def __del__(self) -> None:
        if self.registered is not None:
            self.unregister(self.registered)


_mappings: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()
"""Mappings by address. The tensors over them keep them alive."""


class HostMemory(SlotMemory):
    """Host memory of all ranks, in files of ``folder``. ``register`` gives mapped memory an address on the device."""

    def __init__(
        self,
        folder: Path = FOLDER,
        register: Callable[[int, int], int] = register,
        unregister: Callable[[int], None] = unregister,
    ) -> None:
        self._folder, self._register, self._unregister = folder, register, unregister
        self._files: dict[int, Path] = {}
        """The files of this rank's parts that still have a name, by the part's address."""

    def capacity_for(self, nbytes: int) -> int:
        """See :class:`SlotMemory`. It is no more than needed, rounded up to pages, because /dev/shm is small in containers."""
        return -(-nbytes // _PAGE) * _PAGE

    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
        """See :class:`SlotMemory`. The device is current."""
        made: dict[str, torch.Tensor] = {}
        try:
            for name, size in sizes.items():
                file = self._folder / f"tw_compile-{secrets.token_hex(8)}"
                made[name] = _new(file, size)
                self._files[made[name].data_ptr()] = file
        except OSError as error:
            self.settle(made)
            raise RuntimeError(f"host memory: {_room(self._folder, sum(sizes.values()))}: {error}") from error
        return made

    def share(self, tensors: Mapping[str, torch.Tensor], state: GroupState) -> dict[str, Shared]:
        """See :class:`SlotMemory`. The device is current."""
        return self.share_in(tensors, state.group, state.rank)

    def share_in(self, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup, rank: int) -> dict[str, Shared]:
        """The parts of all ranks of ``group``, in which this process is ``rank``. Collective. The device is current."""
        own = {name: (str(self._files[tensor.data_ptr()]), tensor.numel()) for name, tensor in tensors.items()}
        shared: dict[str, Shared] = {}
        ranks: list[dict[str, tuple[str, int]]] = gather(own, group)
        try:
            for name, tensor in tensors.items():
                parts = [
                    tensor if owner == rank else _existing(Path(files[name][0]), files[name][1])
                    for owner, files in enumerate(ranks)
                ]
                addresses = [self.address(part) for part in parts]
                shared[name] = Shared(parts, addresses)
        except OSError as error:
            raise RuntimeError(f"host memory: the ranks do not share {self._folder}: {error}") from error
        return shared

    def address(self, part: torch.Tensor) -> int:
        """Register a mapped part. Returns the address at which the current device reaches it."""
        address = self._register(part.data_ptr(), part.numel())
        mapping = _mappings[part.data_ptr()]
        mapping.registered, mapping.unregister = part.data_ptr(), self._unregister
        return address

    def settle(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See :class:`SlotMemory`. This unlinks the files."""
        for tensor in tensors.values():
            file = self._files.pop(tensor.data_ptr(), None)
            if file is not None:
                with suppress(FileNotFoundError):
                    file.unlink()


def _new(file: Path, nbytes: int) -> torch.Tensor:
    """``uint8 [nbytes]`` that maps a new file of zeros. OSError if there is no memory for all of it.

    Only this user can open the file.
    """
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return _mapped(descriptor, nbytes)
    except BaseException:
        file.unlink()
        raise
    finally:
        os.close(descriptor)


def _existing(file: Path, nbytes: int) -> torch.Tensor:
    """``uint8 [nbytes]`` that maps a peer's file. OSError if the file belongs to another user or has another size."""
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_size != nbytes:
            raise OSError(
                f"{file}: expected {nbytes} bytes of user {os.getuid()}, got {status.st_size} of {status.st_uid}"
            )
        return _mapped(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    mapping = _Mapping(descriptor, nbytes)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    _mappings[memory.data_ptr()] = mapping
    return memory


def _room(folder: Path, nbytes: int) -> str:
    """An error text about the folder, for a person who can make it larger."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return f"{folder} is not there"
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    return (
        f"no {nbytes / 2**20:.0f} MiB for a rank in {folder}, which has {free / 2**20:.0f} of {size / 2**20:.0f} MiB free "
        "(containers get a larger one by docker run --shm-size or --ipc=host)"
    )
