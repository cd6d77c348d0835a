"""The joint GEMM without a GPU: which operands it takes, what it launches, and what can be read from its machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from machine_code import (
    MEMORY_ACCESSES,
    MEMORY_BARRIERS,
    REGISTERS_OF_AN_SM,
    count,
    instructions,
    moved_registers,
    ptx_with,
    resources,
    smallest_loop_with,
)
from on_gpu import STREAM, OnGpu, hopper_for, off_by, record_launches

from tw_compile.kernels.gemm import joint_mm as module
from tw_compile.kernels.gemm.joint_mm import (
    Form,
    JointMmParams,
    can_add,
    can_multiply,
    gated_mm,
    joint_mm,
    joint_mm_program,
    multiplies,
    shared_bytes,
)
from tw_compile.kernels.runtime.program import FULL_SHARED_BYTES
from tw_compile.planning.joint_tiles import MOST_JOINT, WIDTHS, Tiling, tiling

LATEST_MAY_RUN = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
ROWS, DEPTH, COLUMNS, SMS = 300, 128, (512, 264, 8), 132
KERNELS = pytest.mark.parametrize(("width", "form"), [(width, form) for width in WIDTHS for form in get_args(Form)])


# --- the source ------------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@KERNELS
def test_it_is_compiled_for_the_one_architecture_that_has_the_instructions(width: int, form: Form) -> None:
    """Compiling compares the layouts of the parameters, too."""
    program = joint_mm_program(width, form)
    assert program.arch == "sm_90a" and program.cubin().startswith(b"\x7fELF")


def test_parameters_in_another_order_do_not_compile() -> None:
    fields = dict(JointMmParams._fields_)
    order = ["a", "out", "matrices", *list(fields)[3:]]
    other = type("JointMmParams", (ctypes.Structure,), {"_fields_": [(name, fields[name]) for name in order]})
    with pytest.raises(RuntimeError, match="JointMmParams in Python: offset of out is 128"):
        replace(joint_mm_program(256, "plain"), params=other).cubin()


def test_tensor_maps_lie_where_the_copy_engine_reads_them() -> None:
    assert all(getattr(JointMmParams, name).offset % 64 == 0 for name in ("a", "matrices"))
    assert ctypes.sizeof(JointMmParams) % 64 == 0 and ctypes.sizeof(module.TensorMap) % 64 == 0


@pytest.mark.few(3)
@KERNELS
def test_the_host_knows_the_kernels_sizes(tmp_path: Path, width: int, form: Form) -> None:
    program = joint_mm_program(width, form)
    stages = {256: 4, 224: 5, 192: 5, 160: 6}[width]
    facts = {
        "TILE_ROWS": module._TILE_ROWS,
        "TILE_DEPTH": module._TILE_DEPTH,
        "MATRICES": MOST_JOINT,
        "THREADS": module._THREADS,
        "COLUMNS": width,
        "OUT_COLUMNS": width // 2 if form == "gated" else width,
        "STAGES": stages,
        "STAGE_BYTES": (128 + width) * 128,
        "HALF_A % 1024": 0,
        "HALF_B % 2048": 0,
        "sizeof(Shared)": shared_bytes(width),
    }
    assert shared_bytes(width) <= FULL_SHARED_BYTES < shared_bytes(width) + (128 + width) * 128
    ptx_with(program, tmp_path, *(f"{name} == {value}" for name, value in facts.items()))
    with pytest.raises(RuntimeError, match=r"sizeof\(Shared\) == "):
        ptx_with(program, tmp_path, f"sizeof(Shared) == {shared_bytes(width) - 8}")


# --- machine code ----------------------------------------------------------------------------------------------------

Code = Callable[[int, Form], dict[int, str]]


@pytest.fixture(scope="module")
def code_of(tmp_path_factory: pytest.TempPathFactory) -> Code:
    """Of tiles of some width, in some form."""

    @cache
    def code(width: int, form: Form) -> dict[int, str]:
        return instructions(joint_mm_program(width, form).cubin(), tmp_path_factory.mktemp("code"))

    return code


def hgmma(columns: int) -> str:
    return f"HGMMA.64x{columns}x16.F32.BF16"


def slow(loop: list[str]) -> list[str]:
    return [text for text in loop if MEMORY_BARRIERS.search(text) or MEMORY_ACCESSES.search(text)]


@pytest.mark.few(3)
@KERNELS
def test_it_multiplies_all_columns_of_a_tile_at_once(code_of: Code, width: int, form: Form) -> None:
    """Or half of them, where a tile is narrow or low; of a low gated one a quarter from each matrix. Four steps to a stage."""
    code = code_of(width, form)
    shapes = {width: 4, width // 2: 4} | ({width // 4: 8} if form == "gated" else {})
    assert {columns: count(code, hgmma(columns)) for columns in shapes} == shapes
    assert count(code, "HGMMA") == sum(shapes.values())


@pytest.mark.few(3)
@KERNELS
def test_the_main_loops_wait_for_no_memory(code_of: Code, width: int, form: Form) -> None:
    """Arrivals with more order than they need would put a barrier and an invalidation in them."""
    code = code_of(width, form)
    for columns, times in {width: 4, width // 2: 4, **({width // 4: 8} if form == "gated" else {})}.items():
        loop = smallest_loop_with(code, hgmma(columns))
        assert count(loop, "HGMMA") == count(loop, hgmma(columns)) == times
        assert [text for text in loop if "DEPBAR" in text] == [LATEST_MAY_RUN], "matmuls wait for each other"
        assert count(loop, "SYNCS.PHASECHK") == 2, "the wait, and the one that is repeated"
        assert slow(loop) == []
    assert count(code, "MEMBAR"), "they have another name, which this does not look for"


@KERNELS
def test_the_loop_that_fills_stages_waits_for_no_memory(code_of: Code, width: int, form: Form) -> None:
    code = code_of(width, form)
    boxes = {"UTMALDG.2D [UR": 2, "UTMALDG.2D.MULTICAST": 2 if form == "gated" else 4}
    assert {name: count(code, name) for name in boxes} == boxes, "of rows, and of columns"
    loop = smallest_loop_with(code, "UTMALDG", sum(boxes.values()))
    assert count(loop, "SYNCS.PHASECHK") == 2, "the wait, and the one that is repeated"
    assert slow(loop) == []


@KERNELS
def test_sums_stay_in_registers(code_of: Code, tmp_path: Path, width: int, form: Form) -> None:
    found = resources(joint_mm_program(width, form).cubin(), tmp_path)
    assert found["STACK"] == found["LOCAL"] == 0
    assert found["REG"] * module._THREADS <= REGISTERS_OF_AN_SM
    code = code_of(width, form)
    assert count(code, "LDL") == count(code, "STL") == 0


@KERNELS
def test_registers_that_one_warpgroup_gives_are_those_that_others_take(code_of: Code, width: int, form: Form) -> None:
    taken, given = moved_registers(code_of(width, form))
    assert (taken, given) == ([232], [40])
    assert 128 * (2 * taken[0] + given[0]) <= REGISTERS_OF_AN_SM


# --- operands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> Iterator[list[tuple[int, int]]]:
    with hopper_for(module) as capability:
        yield capability


def make_a(rows: int = ROWS, depth: int = DEPTH, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(rows, depth, dtype=dtype).as_subclass(OnGpu)


def make_matrix(columns: int = COLUMNS[0], depth: int = DEPTH, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(columns, depth, dtype=dtype).as_subclass(OnGpu).t()


def make_matrices(columns: Sequence[int] = COLUMNS) -> list[torch.Tensor]:
    return [make_matrix(one) for one in columns]


def make_bias(columns: int = COLUMNS[0], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(columns, dtype=dtype).as_subclass(OnGpu)


@pytest.mark.parametrize("rows", [0, 1, ROWS])
@pytest.mark.parametrize("columns", [(8,), (512,), (512, 512), COLUMNS])
def test_it_multiplies(hopper: object, columns: tuple[int, ...], rows: int) -> None:
    assert multiplies(make_a(rows), make_matrices(columns))


@pytest.mark.parametrize("count", [0, MOST_JOINT + 1])
def test_it_is_for_one_matrix_to_three(hopper: object, count: int) -> None:
    assert not multiplies(make_a(), [make_matrix()] * count)


def test_it_multiplies_from_multiples_of_16_bytes_on(hopper: object) -> None:
    assert multiplies(off_by(8, make_a()), [off_by(16, make_matrix()), off_by(8, make_matrix(8))])


OTHERS = {
    "float16": (make_a(dtype=torch.float16), make_matrix(dtype=torch.float16)),
    "a matrix of another dtype": (make_a(), make_matrix(dtype=torch.float16)),
    "a of another dtype": (make_a(dtype=torch.float32), make_matrix()),
    "a in columns": (make_a(DEPTH, ROWS).T, make_matrix()),
    "rows of a apart": (make_a(depth=2 * DEPTH)[:, :DEPTH], make_matrix()),
    "every other row of a": (make_a(2 * ROWS)[::2], make_matrix()),
    "a matrix in rows": (make_a(), make_matrix().contiguous()),
    "columns of a matrix apart": (make_a(), make_matrix(depth=2 * DEPTH)[:DEPTH]),
    "every other column": (make_a(), make_matrix()[:, ::2]),
    "another depth": (make_a(depth=2 * DEPTH), make_matrix()),
    "no depth": (make_a(depth=0), make_matrix(depth=0)),
    "no depth, and no strides for it": (
        make_a().as_strided((ROWS, 0), (0, 1)),
        make_matrix().as_strided((0, COLUMNS[0]), (1, 0)),
    ),
    "depth of one tile and a half": (make_a(depth=96), make_matrix(depth=96)),
    "depth of half a tile": (make_a(depth=32), make_matrix(depth=32)),
    "no columns": (make_a(), make_matrix(0)),
    "columns of half a block": (make_a(), make_matrix(260)),
}
AT_OTHER_PLACES = {
    "on a CPU": (make_a().as_subclass(torch.Tensor), make_matrix()),
    "a off 16 bytes": (off_by(4, make_a()), make_matrix()),
    "a matrix off 16 bytes": (make_a(), off_by(4, make_matrix())),
}


@pytest.mark.parametrize("name", OTHERS | AT_OTHER_PLACES)
def test_it_is_not_for_other_operands(hopper: object, name: str) -> None:
    a, matrix = (OTHERS | AT_OTHER_PLACES)[name]
    good = torch.zeros(COLUMNS[0], a.shape[1], dtype=a.dtype).as_subclass(OnGpu).t()
    assert not multiplies(a, [matrix])
    assert not multiplies(a, [good, matrix]) and not multiplies(a, [matrix, good]), "every matrix counts"


@pytest.mark.parametrize("columns", [(8,), (512, 512), COLUMNS])
def test_it_adds_a_bias_for_each_matrix(hopper: object, columns: tuple[int, ...]) -> None:
    a, matrices, biases = make_a(), make_matrices(columns), [make_bias(one) for one in columns]
    assert multiplies(a, matrices, biases)
    assert multiplies(a, matrices, [off_by(2, one) for one in biases]), "4 bytes on"
    assert not multiplies(a, matrices, [*biases[:-1], off_by(1, biases[-1])]), "2 bytes on"
    assert not multiplies(a, matrices, [*biases, biases[0]])
    assert len(columns) == 1 or not multiplies(a, matrices, biases[:-1])


def test_all_operands_are_on_one_device(hopper: object) -> None:
    a, matrix, bias = make_a(), make_matrix(), make_bias()
    elsewhere = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta") for one in (matrix, bias)]
    assert not multiplies(a, [elsewhere[0]]) and not multiplies(a, [matrix], elsewhere[1:])


ADDENDS = {
    "another dtype": make_bias(dtype=torch.float32),
    "one for each row": make_bias(ROWS * COLUMNS[0]).view(ROWS, COLUMNS[0]),
    "a row": make_bias().view(1, -1),
    "one number": make_bias(1),
    "too many": make_bias(COLUMNS[0] + 8),
    "every other one": make_bias(2 * COLUMNS[0])[::2],
    "one number for all": make_bias(1).expand(COLUMNS[0]),
}


@pytest.mark.parametrize("name", ADDENDS)
def test_it_does_not_add_others(hopper: object, name: str) -> None:
    matrix, good, bad = make_matrix(), make_bias(), ADDENDS[name]
    assert can_add(good, matrix) and not can_add(bad, matrix)
    assert not multiplies(make_a(), [matrix], [bad])
    assert not multiplies(make_a(), [matrix] * 2, [good, bad]) and not multiplies(make_a(), [matrix] * 2, [bad, good])


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_it_is_not_for_other_devices(hopper: list[tuple[int, int]], capability: tuple[int, int]) -> None:
    hopper[0] = capability
    assert not multiplies(make_a(), make_matrices())


@pytest.mark.parametrize("name", [None, *OTHERS])
def test_what_it_can_multiply_is_known_before_there_are_values(name: str | None) -> None:
    a, matrix = (make_a(), make_matrix()) if name is None else OTHERS[name]
    on_meta = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta") for one in (a, matrix)]
    assert can_multiply(*on_meta) == can_multiply(a, matrix) == (name is None)


def test_it_can_multiply_what_has_no_address_yet() -> None:
    for a, matrix in AT_OTHER_PLACES.values():
        assert can_multiply(a, matrix)


# --- launches --------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is launched on a device of ``SMS`` SMs."""
    found, kernel = record_launches(monkeypatch, module)
    monkeypatch.setattr(module, "kernel_on", lambda device, width, form: kernel(width=width, form=form))
    monkeypatch.setattr(module, "sms_of", lambda device: SMS)
    return found


def plan(monkeypatch: pytest.MonkeyPatch, tiles: Tiling) -> list[tuple[object, ...]]:
    """What is asked for tiles, of which there are these."""
    asked: list[tuple[object, ...]] = []

    def tiling(*shape: object) -> Tiling:
        asked.append(shape)
        return tiles

    monkeypatch.setattr(module, "tiling", tiling)
    return asked


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS[:2], COLUMNS[:1]])
def test_a_launch_has_the_operands_and_the_kernels_shape(
    monkeypatch: pytest.MonkeyPatch, launches: list[dict[str, Any]], columns: tuple[int, ...], biased: bool
) -> None:
    asked = plan(monkeypatch, Tiling(224, 224, whole=3, narrow=4, low=5, pairs=1.0))
    a, matrices = make_a(), make_matrices(columns)
    biases = [make_bias(one) for one in columns] if biased else []
    outs = joint_mm(a, matrices, biases, 3)
    assert [out.shape for out in outs] == [(ROWS, one) for one in columns]
    assert all(out.dtype == torch.bfloat16 and out.is_contiguous() for out in outs)
    assert asked == [(ROWS, columns, 64)]
    (launch,) = launches
    params = launch.pop("params")
    assert list(params.a)[:4] == [a.data_ptr(), ROWS, DEPTH, 64], "low tiles have one box of 64 rows"
    no_matrix, missing = [0] * 4, MOST_JOINT - len(columns)
    maps = [[one.data_ptr(), one.shape[1], DEPTH, 56] for one in matrices]
    assert [list(one)[:4] for one in params.matrices] == maps + [no_matrix] * missing
    assert list(params.out) == [out.data_ptr() for out in outs] + [None] * missing
    assert list(params.columns) == [*columns, *[0] * missing]
    assert list(params.biases) == ([one.data_ptr() for one in biases] + [None] * missing if biased else [None] * 3)
    assert list(params.begins) == [0, 672, 1120][: len(columns)] + [2**31 - 1] * missing
    assert params.wide == sum(-(-one // 224) for one in columns) and (params.boxes_a, params.boxes_b) == (2, 4)
    assert (params.rows, params.depth, params.whole) == (ROWS, DEPTH, 3)
    sizes = {"block": module._THREADS, "shared_bytes": shared_bytes(224), "cluster": 2}
    form = "biased" if biased else "plain"
    assert launch == {"stream": STREAM, "grid": 24, "width": 224, "form": form, **sizes}


def test_a_gated_launch_has_two_matrices_and_one_result(
    monkeypatch: pytest.MonkeyPatch, launches: list[dict[str, Any]]
) -> None:
    asked = plan(monkeypatch, Tiling(192, 192, whole=2, narrow=6, low=0, pairs=1.0))
    a, gate, up = make_a(), make_matrix(264), make_matrix(264)
    out = gated_mm(a, gate, up, 0)
    assert out.shape == (ROWS, 264) and out.dtype == torch.bfloat16 and out.is_contiguous()
    assert asked == [(ROWS, (528,), 66)], "a tile has columns of both"
    (launch,) = launches
    params = launch.pop("params")
    assert list(params.a)[:4] == [a.data_ptr(), ROWS, DEPTH, 128]
    maps = [[one.data_ptr(), 264, DEPTH, 48] for one in (gate, up)]
    assert [list(one)[:4] for one in params.matrices] == [*maps, [0] * 4]
    assert list(params.out) == [out.data_ptr(), None, None]
    assert list(params.columns) == [264, 0, 0], "the result's, which are half of what is multiplied"
    assert list(params.begins) == [0, 2**31 - 1, 2**31 - 1] and params.wide == 3
    assert (params.boxes_a, params.boxes_b) == (1, 4)
    assert (params.rows, params.depth, params.whole) == (ROWS, DEPTH, 2)
    sizes = {"block": module._THREADS, "shared_bytes": shared_bytes(192), "cluster": 2}
    assert launch == {"stream": STREAM, "grid": 16, "width": 192, "form": "gated", **sizes}


@pytest.mark.parametrize(
    ("width", "multiple", "narrow", "columns", "begin", "wide", "boxes"),
    [
        (256, 256, 0, (512, 512), 512, 4, 2),
        (256, 32, 0, (512, 512), 512, 4, 2),
        (256, 32, 2, (512, 512), 512, 4, 4),
        (256, 32, 0, (264, 512), 288, 4, 8),
        (192, 32, 0, (512, 256), 512, 4, 3),
        (192, 32, 2, (512, 256), 512, 4, 6),
        (192, 192, 2, (512, 256), 576, 5, 4),
        (160, 32, 0, (512, 128), 512, 4, 5),
        (160, 160, 4, (512, 128), 640, 5, 4),
        (224, 32, 0, (512, 384), 512, 4, 7),
    ],
)
def test_boxes_are_as_large_as_they_can_be(
    monkeypatch: pytest.MonkeyPatch,
    launches: list[dict[str, Any]],
    width: int,
    multiple: int,
    narrow: int,
    columns: tuple[int, int],
    begin: int,
    wide: int,
    boxes: int,
) -> None:
    """Each is of one matrix, both CTAs load one at least, and a narrow tile has half of them."""
    plan(monkeypatch, Tiling(width, multiple, 4, narrow, 0, 1.0))
    matrices = make_matrices(columns)
    joint_mm(make_a(), matrices, [], 0)
    params = launches[0]["params"]
    assert (list(params.begins)[:2], params.wide, params.boxes_b) == ([0, begin], wide, boxes)
    assert [list(one)[3] for one in params.matrices] == [width // boxes] * 2 + [0]
    assert begin % (width // boxes) == 0 and boxes % (2 if narrow else 1) == 0


@pytest.mark.parametrize("reserved", [0, 16])
def test_tiles_are_those_of_the_plan(launches: list[dict[str, Any]], reserved: int) -> None:
    joint_mm(make_a(), make_matrices(), [], reserved)
    gated_mm(make_a(), make_matrix(), make_matrix(), reserved)
    clusters = (SMS - reserved) // 2
    for launch, columns in zip(launches, (COLUMNS, (2 * COLUMNS[0],)), strict=True):
        tiles = tiling(ROWS, columns, clusters)
        assert (launch["width"], launch["params"].whole) == (tiles.width, tiles.whole)
        assert launch["grid"] == 2 * min(clusters, tiles.whole + tiles.narrow + tiles.low)


@pytest.mark.parametrize(("reserved", "grid"), [(0, 132), (1, 130), (16, 116), (15, 116), (130, 2), (131, 2), (200, 2)])
def test_a_grid_leaves_sms_and_is_of_whole_clusters(
    monkeypatch: pytest.MonkeyPatch, launches: list[dict[str, Any]], reserved: int, grid: int
) -> None:
    asked = plan(monkeypatch, Tiling(256, 256, whole=1000, narrow=0, low=0, pairs=1.0))
    joint_mm(make_a(), make_matrices(), [], reserved)
    assert [launch["grid"] for launch in launches] == [grid]
    assert asked == [(ROWS, COLUMNS, grid // 2)]


@pytest.mark.parametrize(
    "tiles", [Tiling(256, 256, 1, 0, 0, 1.0), Tiling(256, 256, 0, 2, 0, 0.6), Tiling(256, 256, 0, 0, 3, 0.65)]
)
def test_a_grid_has_no_more_clusters_than_pairs(
    monkeypatch: pytest.MonkeyPatch, launches: list[dict[str, Any]], tiles: Tiling
) -> None:
    plan(monkeypatch, tiles)
    joint_mm(make_a(), make_matrices(), [], 0)
    assert [launch["grid"] for launch in launches] == [2 * (tiles.whole + tiles.narrow + tiles.low)]


def test_nothing_is_launched_for_no_rows(launches: list[dict[str, Any]]) -> None:
    outs = joint_mm(make_a(0), make_matrices(), [], 16)
    assert [out.shape for out in outs] == [(0, one) for one in COLUMNS]
    out = gated_mm(make_a(0), make_matrix(), make_matrix(), 16)
    assert out.shape == (0, COLUMNS[0]) and launches == []
    assert all(one.dtype == torch.bfloat16 for one in (*outs, out))
