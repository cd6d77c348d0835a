"""Pinned host memory that the ranks of a node share. GPUs without peer access can all reach it.

Each rank makes a file of its own in /dev/shm for each buffer, and allocates all its pages. So a full /dev/shm is found here,
and not by a signal later. The rank that writes a page also allocates it, so the page is near that rank's GPU if the process is
bound to a socket. Every rank maps the files of all ranks and registers them with CUDA, which pins them and gives them device
addresses. The files are unlinked as soon as all ranks have them open. So nothing is left in /dev/shm, however a process ends.

Containers have a small /dev/shm unless they are started with a larger one. A rank that finds no room there makes a file that
has no name (``memfd_create``), which only the memory of the machine or the container limits. The others open it by the number
that it has in the owner's process, which ranks of one container may do. Such a number may mean another file where containers
have processes of their own. So the file has a random title, and who opens it checks that. Names come first, as ranks in
containers of their own may share a /dev/shm, but not their processes.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _File:
    """How other ranks open the file of a part: ``path``, and what is held until they have.

    Of a file without a name ``title`` is what the kernel calls it, ``descriptor`` its number in the owner's process, and
    ``without_name`` says why it has no name.
    """

    path: str
    title: str = ""
    descriptor: int | None = None
    without_name: str = ""

    def settle(self) -> None:
        """Unlink or close it. Its memory stays for as long as it is mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            return
        with suppress(FileNotFoundError):
            os.unlink(self.path)


_mappings: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()
"""Mappings by address. The tensors over them keep them alive."""


class HostMemory(SlotMemory):
    """Host memory of all ranks, in files of ``folder`` or without a name. ``register`` gives it an address on the device."""

    def __init__(
        self,
        folder: Path = FOLDER,
        register: Callable[[int, int], int] = register,
        unregister: Callable[[int], None] = unregister,
    ) -> None:
        self._folder, self._register, self._unregister = folder, register, unregister
        self._files: dict[int, _File] = {}
        """The files of this rank's parts that others can still open, by the part's address."""

    def capacity_for(self, nbytes: int) -> int:
        """See :class:`SlotMemory`. It is no more than needed, rounded up to pages, because all of it is pinned."""
        return -(-nbytes // _PAGE) * _PAGE

    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
        """See :class:`SlotMemory`. The device is current."""
        made: dict[str, torch.Tensor] = {}
        try:
            for name, size in sizes.items():
                made[name], file = _new(self._folder, size, sum(sizes.values()))
                self._files[made[name].data_ptr()] = file
        except BaseException as error:
            self.settle(made)
            if isinstance(error, OSError):
                raise RuntimeError(f"host memory: {error}") from error
            raise
        return made

    def share(self, tensors: Mapping[str, torch.Tensor], state: GroupState) -> dict[str, Shared]:
        """See :class:`SlotMemory`. The device is current."""
        return self.share_in(tensors, state.group, state.rank)

    def share_in(self, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup, rank: int) -> dict[str, Shared]:
        """The parts of all ranks of ``group``, in which this process is ``rank``. Collective. The device is current."""
        own = {name: (self._files[tensor.data_ptr()], tensor.numel()) for name, tensor in tensors.items()}
        shared: dict[str, Shared] = {}
        ranks: list[dict[str, tuple[_File, int]]] = gather(own, group)
        for name, tensor in tensors.items():
            parts = [tensor if owner == rank else self._of_peer(*files[name]) for owner, files in enumerate(ranks)]
            addresses = [self.address(part) for part in parts]
            shared[name] = Shared(parts, addresses)
        return shared

    def _of_peer(self, file: _File, nbytes: int) -> torch.Tensor:
        """A part of another rank. RuntimeError if this process can't open its file."""
        try:
            return _existing(file, nbytes)
        except OSError as error:
            if file.without_name:
                why = f"{file.without_name}, and {file.path}, which needs no room there, is not open to another rank"
                raise RuntimeError(f"host memory: {why}: {error}") from error
            raise RuntimeError(f"host memory: the ranks do not share {self._folder}: {error}") from error

    def address(self, part: torch.Tensor) -> int:
        """Register a mapped part. Returns the address at which the current device reaches it."""
        address = self._register(part.data_ptr(), part.numel())
        mapping = _mappings[part.data_ptr()]
        mapping.registered, mapping.unregister = part.data_ptr(), self._unregister
        return address

    def settle(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See :class:`SlotMemory`. All ranks have the files open, or need them no more."""
        for tensor in tensors.values():
            file = self._files.pop(tensor.data_ptr(), None)
            if file is not None:
                file.settle()


def _new(folder: Path, nbytes: int, of_rank: int) -> tuple[torch.Tensor, _File]:
    """``uint8 [nbytes]`` that maps a new file of zeros, in ``folder`` if there is room. OSError if there is no memory.

    Only this user can open the file. ``of_rank``: the bytes that the rank needs in all.
    """
    try:
        return _with_name(folder / f"tw_compile-{secrets.token_hex(8)}", nbytes)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT) or not folder.is_dir()
        return _without_name(nbytes, f"{_room(folder, of_rank)}: {error}" if full else f"no file in {folder}: {error}")


def _with_name(path: Path, nbytes: int) -> tuple[torch.Tensor, _File]:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return _mapped(descriptor, nbytes), _File(str(path))
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def _without_name(nbytes: int, why: str) -> tuple[torch.Tensor, _File]:
    if not hasattr(os, "memfd_create"):  # a Python that was built for a glibc before 2.27
        raise OSError(f"{why}; this Python has no memfd_create, which needs no room there")
    title = f"tw_compile-{secrets.token_hex(8)}"
    descriptor = None
    try:
        descriptor = os.memfd_create(title, os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)
        file = _File(f"/proc/{os.getpid()}/fd/{descriptor}", title, descriptor, why)
        return _mapped(descriptor, nbytes), file
    except BaseException as error:
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise OSError(f"{why}; without a file there: {error}") from error
        raise


def _existing(file: _File, nbytes: int) -> torch.Tensor:
    """``uint8 [nbytes]`` that maps a peer's file. OSError if it is another file, another user's, or has another size."""
    if file.title:  # what /proc has are links; of another process this one may be the link to a device, so look before
        _check_title(file, file.path)
        descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
    else:
        descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if file.title:
            _check_title(file, f"/proc/self/fd/{descriptor}")
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_size != nbytes:
            raise OSError(
                f"{file.path}: expected {nbytes} bytes of user {os.getuid()}, got {status.st_size} of {status.st_uid}"
            )
        return _mapped(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _check_title(file: _File, link: str) -> None:
    """OSError if ``link`` is no link to the file without a name that a peer has made."""
    found = os.readlink(link)
    if found != f"/memfd:{file.title} (deleted)":
        raise OSError(f"{file.path}: expected the file {file.title} of another rank, got {found}, of another process")


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
