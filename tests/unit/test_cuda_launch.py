"""What reaches the driver, with a driver that only takes notes; its types are those of cuda-bindings."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cuda.bindings import driver

from tw_compile.kernels.runtime import bindings, launch
from tw_compile.kernels.runtime.launch import prepare
from tw_compile.kernels.runtime.program import Program

SOURCE = """
struct Params { int* out; int rows; };
extern "C" __global__ void fill(const __grid_constant__ Params params) { params.out[threadIdx.x] = params.rows; }
"""
STATIC_LIMIT = 48 * 1024 - 16
FUNCTION = 77


class Params(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("rows", ctypes.c_int32)]


class FakeDriver:
    """Records every call as ``(name, arguments)``; ``failures`` maps names to the codes of their next calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failures: dict[str, list[driver.CUresult]] = {}
        self.thread_context = 0
        self.capturing = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(driver, name)

        def function(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuLaunchKernelEx":
                arguments = (arguments[0], arguments[1], self.params_at(arguments[2]), arguments[3])
            if name == "cuGraphExecKernelNodeSetParams":
                arguments = (*arguments[:2], self.params_at(arguments[2].kernelParams))
            self.calls.append((name, arguments))
            if name == "cuModuleLoadData":
                time.sleep(0.01)  # long enough for other threads to come in between
            if self.failures.get(name):
                return (self.failures[name].pop(0),)
            return (driver.CUresult.CUDA_SUCCESS, *self.values(name, arguments))

        function.__name__ = name  # which error messages show
        return function

    def values(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        results: dict[str, Any] = {
            "cuDeviceGet": lambda ordinal: 100 + ordinal,
            "cuDevicePrimaryCtxRetain": lambda device: 1000 + device,
            "cuModuleLoadData": lambda image: 55,
            "cuModuleGetFunction": lambda module, name: FUNCTION,
            "cuFuncGetAttribute": lambda attribute, function: STATIC_LIMIT,
            "cuCtxGetCurrent": lambda: self.thread_context,
            "cuCtxPopCurrent": lambda: 0,
            "cuStreamIsCapturing": lambda stream: self.capturing,
            "cuGraphCreate": lambda flags: 5,
            "cuGraphAddKernelNode": lambda graph, dependencies, count, params: 6,
            "cuGraphInstantiate": lambda graph, flags: 700 + len(self.named("cuGraphInstantiate")),
        }
        return (results[name](*arguments),) if name in results else ()

    @staticmethod
    def params_at(pointers: int) -> bytes:
        (address,) = (ctypes.c_void_p * 1).from_address(pointers)
        return ctypes.string_at(address, ctypes.sizeof(Params))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake, load = FakeDriver(), bindings.load
    monkeypatch.setattr(bindings, "load", lambda module: fake if module == "driver" else load(module))
    monkeypatch.setattr(launch, "loaded", {})
    return fake


@pytest.fixture
def fill(tmp_path: Path) -> Program:
    source = tmp_path / "fill.cu"
    source.write_text(SOURCE)
    return Program(source, Params, "sm_90a")


def test_loading_is_in_the_devices_primary_context(fake: FakeDriver, fill: Program) -> None:
    prepare(fill, 1)
    assert fake.calls == [
        ("cuInit", (0,)),
        ("cuDeviceGet", (1,)),
        ("cuDevicePrimaryCtxRetain", (101,)),
        ("cuCtxPushCurrent", (1101,)),
        ("cuModuleLoadData", (fill.cubin(),)),
        ("cuModuleGetFunction", (55, b"fill")),
        ("cuFuncGetAttribute", (driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, FUNCTION)),
        ("cuCtxPopCurrent", ()),
    ]


def test_each_device_loads_once(fake: FakeDriver, fill: Program) -> None:
    with ThreadPoolExecutor(4) as threads:
        kernels = list(threads.map(lambda device: prepare(replace(fill), device), [0, 1, 0, 1, 0, 1]))
    assert len(fake.named("cuModuleLoadData")) == 2
    assert len(set(kernels)) == 2
    assert prepare(replace(fill, defines=(("OTHER", 1),)), 0) not in kernels


def test_launch_passes_everything_on(fake: FakeDriver, fill: Program) -> None:
    prepare(fill, 0).launch(Params(0x1234, 7), stream=0xABC, grid=8, block=128)
    ((config, function, params, extra),) = fake.named("cuLaunchKernelEx")
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (8, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    assert (int(config.hStream), config.sharedMemBytes, config.numAttrs) == (0xABC, 0, 0)
    assert (function, params, extra) == (FUNCTION, bytes(Params(0x1234, 7)), 0)


def test_attributes_of_a_launch(fake: FakeDriver, fill: Program) -> None:
    prepare(fill, 0).launch(Params(), stream=0, grid=8, block=128, cluster=4, programmatic=True)
    ((config, *_),) = fake.named("cuLaunchKernelEx")
    dependent, cluster = config.attrs
    assert config.numAttrs == 2
    assert dependent.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert dependent.value.programmaticStreamSerializationAllowed == 1
    assert cluster.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert [getattr(cluster.value.clusterDim, axis) for axis in "xyz"] == [4, 1, 1]


def test_equal_launches_share_a_config_and_others_do_not(fake: FakeDriver, fill: Program) -> None:
    kernel = prepare(fill, 0)
    shape: dict[str, Any] = {
        "stream": 1,
        "grid": 8,
        "block": 128,
        "shared_bytes": 0,
        "cluster": 1,
        "programmatic": False,
    }
    others = [{"stream": 2}, {"grid": 4}, {"block": 64}, {"shared_bytes": 64}, {"cluster": 2}, {"programmatic": True}]
    for change in [{}, *others, {}]:
        kernel.launch(Params(), **shape | change)
    configs = [arguments[0] for arguments in fake.named("cuLaunchKernelEx")]
    assert configs[0] is configs[-1]
    assert len({id(config) for config in configs}) == 1 + len(others)


def test_shared_memory_limit_is_raised_when_a_launch_needs_it(fake: FakeDriver, fill: Program) -> None:
    kernel = prepare(fill, 0)
    for shared_bytes in (0, STATIC_LIMIT, STATIC_LIMIT + 16, 200_000, 100_000):
        kernel.launch(Params(), stream=0, grid=1, block=32, shared_bytes=shared_bytes)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert fake.named("cuFuncSetAttribute") == [(FUNCTION, attribute, size) for size in (STATIC_LIMIT + 16, 200_000)]
    assert [arguments[0].sharedMemBytes for arguments in fake.named("cuLaunchKernelEx")][-1] == 100_000


def test_thread_without_a_context_gets_the_devices(fake: FakeDriver, fill: Program) -> None:
    kernel = prepare(fill, 1)
    fake.failures["cuLaunchKernelEx"] = [driver.CUresult.CUDA_ERROR_INVALID_CONTEXT]
    thread = Thread(target=lambda: kernel.launch(Params(), stream=0, grid=1, block=32))
    thread.start()
    thread.join()
    assert [name for name, _ in fake.calls[-3:]] == ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuLaunchKernelEx"]
    assert fake.named("cuCtxSetCurrent") == [(1101,)]


def test_context_of_another_device_is_left_alone(fake: FakeDriver, fill: Program) -> None:
    kernel = prepare(fill, 1)
    fake.thread_context = 1100
    fake.failures["cuLaunchKernelEx"] = [driver.CUresult.CUDA_ERROR_INVALID_CONTEXT]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_CONTEXT"):
        kernel.launch(Params(), stream=0, grid=1, block=32)
    assert fake.named("cuCtxSetCurrent") == []


def test_beside_other_work_a_kernel_is_launched_as_a_graph_of_its_own(fake: FakeDriver, fill: Program) -> None:
    kernel = prepare(fill, 1)
    for rows, stream in ((7, 0xA), (8, 0xA), (9, 0xB)):
        kernel.launch(
            Params(0x1234, rows), stream=stream, grid=8, block=128, shared_bytes=60_000, cluster=4, beside=True
        )
    assert fake.named("cuLaunchKernelEx") == []
    (_, _, _, node), _ = fake.named("cuGraphAddKernelNode")
    assert (node.gridDimX, node.gridDimY, node.gridDimZ, node.sharedMemBytes) == (8, 1, 1, 60_000)
    assert (node.blockDimX, node.blockDimY, node.blockDimZ, int(node.func)) == (128, 1, 1, FUNCTION)
    (_, attribute, value), _ = fake.named("cuGraphKernelNodeSetAttribute")
    assert attribute == driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert [getattr(value.clusterDim, axis) for axis in "xyz"] == [4, 1, 1]
    given = [(graph, params) for graph, _, params in fake.named("cuGraphExecKernelNodeSetParams")]
    assert given == [(701, bytes(Params(0x1234, 7))), (701, bytes(Params(0x1234, 8))), (702, bytes(Params(0x1234, 9)))]
    assert fake.named("cuGraphLaunch") == [(701, 0xA), (701, 0xA), (702, 0xB)]
    names = [name for name, _ in fake.calls]
    assert names.index("cuFuncSetAttribute") < names.index("cuGraphAddKernelNode"), "the limit holds for nodes, too"


def test_where_a_graph_is_captured_the_kernel_becomes_part_of_it(fake: FakeDriver, fill: Program) -> None:
    fake.capturing = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    prepare(fill, 0).launch(Params(), stream=0xA, grid=8, block=128, beside=True)
    assert fake.named("cuStreamIsCapturing") == [(0xA,)]
    assert len(fake.named("cuLaunchKernelEx")) == 1
    assert fake.named("cuGraphLaunch") == []


@pytest.mark.parametrize("call", ["cuStreamIsCapturing", "cuGraphExecKernelNodeSetParams", "cuGraphLaunch"])
def test_graph_of_a_thread_without_a_context_gets_the_devices(fake: FakeDriver, fill: Program, call: str) -> None:
    kernel = prepare(fill, 1)
    fake.failures[call] = [driver.CUresult.CUDA_ERROR_INVALID_CONTEXT]
    kernel.launch(Params(), stream=0, grid=1, block=32, beside=True)
    assert fake.named("cuCtxSetCurrent") == [(1101,)]
    assert fake.calls[-1][0] == "cuGraphLaunch"


FALLIBLE_BESIDE = """
    cuStreamIsCapturing cuGraphCreate cuGraphAddKernelNode cuGraphInstantiate cuGraphExecKernelNodeSetParams cuGraphLaunch
"""


@pytest.mark.parametrize("call", FALLIBLE_BESIDE.split())
def test_error_of_a_graph_names_kernel_device_call_and_code(fake: FakeDriver, fill: Program, call: str) -> None:
    fake.failures[call] = [driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU]
    with pytest.raises(RuntimeError, match=rf"kernel fill \(sm_90a\) on cuda:2: {call} .*CUDA_ERROR_NO_BINARY_FOR_GPU"):
        prepare(fill, 2).launch(Params(), stream=0, grid=1, block=32, beside=True)


FALLIBLE = """
    cuInit cuDeviceGet cuDevicePrimaryCtxRetain cuCtxPushCurrent cuModuleLoadData cuModuleGetFunction cuFuncGetAttribute
    cuCtxPopCurrent cuFuncSetAttribute cuLaunchKernelEx
"""


@pytest.mark.parametrize("call", FALLIBLE.split())
def test_every_error_names_kernel_device_call_and_code(fake: FakeDriver, fill: Program, call: str) -> None:
    fake.failures[call] = [driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU]
    with pytest.raises(RuntimeError, match=rf"kernel fill \(sm_90a\) on cuda:2: {call} .*CUDA_ERROR_NO_BINARY_FOR_GPU"):
        prepare(fill, 2).launch(Params(), stream=0, grid=1, block=32, shared_bytes=60_000)


def test_loading_that_failed_is_tried_again_and_leaves_no_context(fake: FakeDriver, fill: Program) -> None:
    fake.failures["cuModuleLoadData"] = [driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        prepare(fill, 0)
    assert fake.calls[-1] == ("cuCtxPopCurrent", ())
    prepare(fill, 0)
    assert len(fake.named("cuModuleLoadData")) == 2


def test_other_struct_is_refused(fake: FakeDriver, fill: Program) -> None:
    class Other(ctypes.Structure):
        _fields_ = [("out", ctypes.c_void_p)]

    with pytest.raises(ValueError, match=r"params: .* takes Params, got Other"):
        prepare(fill, 0).launch(Other(), stream=0, grid=1, block=32)
    assert fake.named("cuLaunchKernelEx") == []
