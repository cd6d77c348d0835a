"""Compiled programs on a device, launched through the driver API."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from tw_compile.kernels.runtime import bindings
from tw_compile.kernels.runtime.own_graph import OwnGraph
from tw_compile.kernels.runtime.program import Program

_PointerArray = ctypes.c_void_p * 1

loaded: dict[tuple[Program, int], Kernel] = {}
_lock = Lock()


def prepare(program: Program, device: int) -> Kernel:
    """``program`` on the device with this CUDA ordinal. The first call compiles and loads it, later calls look it up.

    Loading may allocate and wait for the device. While a CUDA graph is captured, drivers of CUDA 12.3 and later allow loading
    (says NVIDIA Warp's documentation of ``capture_begin``). Older drivers refuse, and the capture is lost. So call this before
    any capture; this also keeps compilation out of the capture. A loaded kernel stays until the process ends, because captured
    graphs hold it. Keep the returned kernel: the look-up costs as much as a launch.
    """
    with _lock:
        if (program, device) not in loaded:
            loaded[program, device] = Kernel(program, device)
        return loaded[program, device]


class Kernel:
    """A program loaded on one device; made by :func:`prepare`. Threads may share it."""

    def __init__(self, program: Program, device: int) -> None:
        self._params = program.params
        self._where = f"kernel {program.entry} ({program.arch}) on cuda:{device}"
        self._driver = driver = bindings.load("driver")
        self._launch = driver.cuLaunchKernelEx
        self._invalid_context = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._shared_attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._configs: dict[tuple[int, ...], Any] = {}
        self._graphs: dict[tuple[int, ...], OwnGraph] = {}
        cubin = program.cubin()
        self._call(driver.cuInit, 0)
        self._device = self._call(driver.cuDeviceGet, device)
        self._context = self._call(driver.cuDevicePrimaryCtxRetain, self._device)  # the one that torch works in
        with self._current_context():
            module = self._call(driver.cuModuleLoadData, cubin)
            # The driver may defer the loading of a module's kernels, but only up to this call (CUDA programming guide, lazy
            # loading).
            self._function = self._call(driver.cuModuleGetFunction, module, program.entry.encode())
            self._shared_limit = self._call(driver.cuFuncGetAttribute, self._shared_attribute, self._function)

    def launch(
        self,
        params: ctypes.Structure,
        *,
        stream: int,
        grid: int,
        block: int,
        shared_bytes: int = 0,
        cluster: int = 1,
        programmatic: bool = False,
        beside: bool = False,
    ) -> None:
        """Enqueue ``grid`` CTAs of ``block`` threads on ``stream``, a stream handle. The kernel's device must be current.

        ``params`` is copied before this returns. ``shared_bytes`` is a CTA's dynamic shared memory, ``cluster`` the CTAs
        of a cluster; ``grid`` must be a multiple of it. With ``programmatic`` (programmatic dependent launch) the grid may
        start before the stream's previous grid has ended: the kernel waits for that itself, by ``griddepcontrol.wait``.
        ``beside``: the stream is not the stream on which all other work runs, see ``own_graph.py``; not with ``programmatic``.
        """
        if type(params) is not self._params:
            raise ValueError(f"params: {self._where} takes {self._params.__name__}, got {type(params).__name__}")
        pointers = _PointerArray(ctypes.addressof(params))
        key = (stream, grid, block, shared_bytes, cluster, programmatic)
        enqueue = self._launch_beside if beside else self._launch_kernel
        call, code = enqueue(key, ctypes.addressof(pointers))
        if code == self._invalid_context and self._give_thread_a_context():
            call, code = enqueue(key, ctypes.addressof(pointers))
        if code:
            raise RuntimeError(
                f"{self._where}: {call} failed with {code.name} (grid {grid}, "
                f"block {block}, {shared_bytes} bytes of dynamic shared memory, cluster {cluster}, programmatic {programmatic})"
            )

    def _launch_kernel(self, key: tuple[int, ...], pointers: int) -> tuple[str, Any]:
        """Launch directly. Returns the name of the last driver call and its code.

        ``key``: stream, grid, block, shared_bytes, cluster, programmatic.
        """
        config = self._configs.get(key)
        if config is None:
            # The stream is part of the key: a config that other threads change between uses would not be thread-safe.
            self._allow_shared(key[3])
            config = self._configs[key] = launch_config(self._driver, *key)
        return "cuLaunchKernelEx", self._launch(config, self._function, pointers, 0)[0]

    def _launch_beside(self, key: tuple[int, ...], pointers: int) -> tuple[str, Any]:
        """As :meth:`_launch_kernel`, but launch a CUDA graph of its own. In a capture, launch as part of the captured graph."""
        stream, grid, block, shared_bytes, cluster, _ = key
        code, *capturing = self._driver.cuStreamIsCapturing(stream)
        if code:
            return "cuStreamIsCapturing", code
        if capturing[0]:
            return self._launch_kernel(key, pointers)
        graph = self._graphs.get(key)
        if graph is None:
            self._allow_shared(shared_bytes)
            shape = {"grid": grid, "block": block, "shared_bytes": shared_bytes, "cluster": cluster}
            with self._current_context():
                graph = self._graphs[key] = OwnGraph(self._driver, self._call, self._function, pointers, **shape)
        return graph.launch(pointers, stream)

    def _allow_shared(self, shared_bytes: int) -> None:
        """Raise the kernel's limit of dynamic shared memory, never lower it. It starts at 48 KiB minus static shared memory."""
        with _lock:
            if shared_bytes > self._shared_limit:
                with self._current_context():
                    self._call(self._driver.cuFuncSetAttribute, self._function, self._shared_attribute, shared_bytes)
                self._shared_limit = shared_bytes

    def _give_thread_a_context(self) -> bool:
        """Make the context current if this thread has none. torch gives a thread a context only when torch needs one itself.

        Returns whether the thread had none.
        """
        if int(self._call(self._driver.cuCtxGetCurrent)):
            return False
        self._call(self._driver.cuCtxSetCurrent, self._context)
        return True

    @contextmanager
    def _current_context(self) -> Iterator[None]:
        self._call(self._driver.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            self._call(self._driver.cuCtxPopCurrent)

    def _call(self, function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
        return bindings.call(function, *arguments, where=self._where)


def launch_config(
    driver: Any, stream: int, grid: int, block: int, shared_bytes: int, cluster: int, programmatic: int
) -> Any:
    """A ``CUlaunchConfig``; the arguments are those of :meth:`Kernel.launch`."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    attributes = []
    if programmatic:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attribute.value.clusterDim
        shape.x, shape.y, shape.z = cluster, 1, 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
