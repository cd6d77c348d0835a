"""The two-shot kernel without a GPU: compiled for sm_90 and sm_100, and interpreted by Triton in two processes."""

from __future__ import annotations

import dataclasses
import os
import queue
import re
import subprocess
import sys
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.spec import NormSpec, row_range, rows_per_rank
from tw_compile.testing import assert_within_budget

WORLD_SIZE = 2
HIDDEN = 48  # not a power of two, rows of 192 bytes
WORKER_SECONDS = 50


def compile_all_reduce(arch: int, hidden_size: int, world_size: int, **overrides: Any) -> Any:
    """The kernel compiled for compute capability ``arch``; ``overrides`` replace argument types or constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tw_compile.kernels.algorithms.two_shot.kernel import all_reduce_rms_norm_kernel as kernel
    from tw_compile.kernels.collective.row import launch_shape, normalise_row

    block, num_warps = launch_shape(hidden_size)
    arguments: dict[str, Any] = dict.fromkeys(("x", "residual", "bias", "weight", "hidden", "residual_out"), "*bf16")
    arguments |= dict.fromkeys(("staging_table", "hidden_table", "residual_table", "pads"), "*i64")
    arguments |= {
        "norm_bias": None,
        "hidden_scale": None,
        "epochs": "*i32",
        "status": "*i32",
        "rank": "i32",
        "tokens": "i32",
    }
    arguments |= {"eps": "fp32", "weight_offset": "fp32", "scale": "fp32"}
    arguments |= {"HIDDEN": hidden_size, "BLOCK": block, "WORLD_SIZE": world_size}
    arguments |= {"RESIDUAL_SHARDED": False, "RESIDUAL_OUT": "replicated", "CAST_BEFORE_WEIGHT": None, "SPIN_LIMIT": 0}
    arguments |= {"STAGED": True, "NORMALISE": normalise_row} | overrides
    types = {
        name: value if isinstance(value, str) and name.islower() else "constexpr" for name, value in arguments.items()
    }
    constants = {name: arguments[name] for name, kind in types.items() if kind == "constexpr"}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if str(types[name]).startswith("*")
    }
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants, attributes)
    return compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})


FORMS: list[tuple[int, int, int, dict[str, Any]]] = [
    (90, 8192, 4, {}),
    (90, 2880, 8, {"RESIDUAL_OUT": "sharded", "RESIDUAL_SHARDED": True, "bias": None, "residual_table": None}),
    (90, 32768, 2, {"x": "*fp16", "hidden": "*fp16", "weight": "*fp32", "residual_out": "*fp32", "residual": "*fp32"}),
    (90, 1024, 3, {"SPIN_LIMIT": 1000, "residual": None, "weight": None, "RESIDUAL_OUT": "none"}),
    (90, 4096, 2, dict.fromkeys(("x", "residual", "bias", "weight", "hidden", "residual_out"), "*fp32")),
    (100, 8192, 8, {"RESIDUAL_OUT": "sharded"}),
    (90, 2880, 4, {"hidden": "*fp8e4nv", "hidden_scale": "*fp32"}),
    (100, 8192, 8, {"hidden": "*fp8e4nv", "hidden_scale": "*fp32", "RESIDUAL_OUT": "none"}),
    (90, 8192, 4, {"STAGED": False}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("arch", "hidden_size", "world_size", "overrides"), FORMS)
def test_rows_move_in_16_byte_accesses(arch: int, hidden_size: int, world_size: int, overrides: dict[str, Any]) -> None:
    ptx = compile_all_reduce(arch, hidden_size, world_size, **overrides).asm["ptx"]
    vector = r"\.global(?:\.[a-z0-9_:]+)*\.(v4\.b32|v2\.b64)"
    for access in ("ld", "st"):
        wide = len(re.findall(rf"\b{access}{vector}", ptx))
        assert wide > 0
        # What is narrower are table entries, flags and epochs: 32 or 64 bits, never a piece of a row.
        narrow = re.findall(rf"\b{access}\.global(?:\.[a-z_:]+)*\.(b16|u16|v2\.b16|v4\.b16|v2\.b32)\b", ptx)
        assert narrow == []


@pytest.mark.parametrize("spin_limit", [0, 1000])
def test_flags_are_released_and_acquired_at_system_scope(spin_limit: int) -> None:
    ptx = compile_all_reduce(90, 1024, 4, SPIN_LIMIT=spin_limit).asm["ptx"]
    lines = [line.strip() for line in ptx.splitlines()]
    atomics = [index for index, line in enumerate(lines) if re.search(r"\batom\.", line)]
    released = [index for index in atomics if "exch" in lines[index]]
    acquired = [index for index in atomics if ".add." in lines[index]]
    assert sorted(released + acquired) == atomics
    assert len(released) == 2  # one signal a barrier
    for index in released:
        assert {"sys", "release"} <= set(lines[index].split()[1].split("."))
        before = [line for line in lines[:index] if re.search(r"\bbar\.sync|\bst\.global", line)]
        assert "bar.sync" in before[-1], "a store of the CTA is not ordered before the flag"
    assert len(acquired) >= 4  # before and inside the loop of either barrier
    for index in acquired:
        assert {"sys", "acquire"} <= set(lines[index].split()[1].split("."))
    for barrier_end in (max(a for a in acquired if a < released[1]), acquired[-1]):
        after = [line for line in lines[barrier_end + 1 :] if re.search(r"\bbar\.sync|\bld\.global\.v", line)]
        assert "bar.sync" in after[0], "a row may be read before the flag was seen"


def test_l1_is_invalidated_after_every_acquire(tmp_path: Any) -> None:
    """The memory-order argument rests on it; see ``tw_compile.kernels.runtime.barrier``."""
    sass = disassemble(compile_all_reduce(90, 8192, 4), tmp_path)
    order = re.findall(r"\b(MEMBAR\.\w+\.SYS|ATOMG\.E\.EXCH\.STRONG\.SYS|ATOMG\.E\.ADD\.STRONG\.SYS|CCTL\.IVALL)", sass)
    assert "ATOMG.E.EXCH.STRONG.SYS" in order
    for index, operation in enumerate(order):
        if "EXCH" in operation:
            assert order[index - 1].startswith("MEMBAR")
        if "ADD" in operation:
            assert order[index + 1] == "CCTL.IVALL"
    assert "LDG.E.128" in sass and "STG.E.128" in sass


def disassemble(compiled: Any, folder: Any) -> str:
    import triton

    cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    return subprocess.run([cuobjdump, "-sass", binary], capture_output=True, text=True, check=True, timeout=60).stdout


def instructions(ptx: str, pattern: str) -> list[tuple[int, str]]:
    """(line, instruction) of the instructions that match; debug lines don't."""
    found = []
    for number, line in enumerate(ptx.splitlines()):
        code = line.split("//")[0]
        if not code.strip().startswith("."):
            found += [(number, match) for match in re.findall(pattern, code)]
    return found


@pytest.mark.parametrize("arch", [90, 100])
def test_fp8_rows_are_published_in_half_as_many_accesses(arch: int) -> None:
    fp8 = {"hidden": "*fp8e4nv", "hidden_scale": "*fp32", "RESIDUAL_OUT": "none"}
    for hidden_size in (2880, 8192):  # of one thread: 16 elements, so one access of 16 bytes and not two
        p2p = compile_all_reduce(arch, hidden_size, 8, **fp8).asm["ptx"]
        released = [number for number, _ in instructions(p2p, r"atom\.\S*release\S*exch\S*")]
        stores = [code for number, code in instructions(p2p, r"\bst\.global\S*") if released[0] < number < released[1]]
        assert stores == ["st.global.v4.b32"] * 8  # the local row and 7 peers
        assert instructions(p2p, r"cvt\.rn\.satfinite\.e4m3x2\.f32")
        assert instructions(p2p, r"div\.rn\.f32")


def test_grid_and_capacity_depend_on_shapes_only() -> None:
    from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
    from tw_compile.kernels.collective.slot import MIN_CAPACITY_BYTES, capacity_for
    from tw_compile.kernels.runtime.barrier import MAX_CTAS

    assert [TwoShot().sms(tokens, 4) for tokens in (1, 4, 5, 65536)] == [1, 1, 2, MAX_CTAS]
    assert capacity_for(1) == MIN_CAPACITY_BYTES
    assert capacity_for(MIN_CAPACITY_BYTES + 1) == 2 * MIN_CAPACITY_BYTES


# --- interpreter -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One launch. ``residual``: none, full or sharded input; ``out``: what of the residual is wanted back."""

    tokens: int
    grid: int
    residual: str = "full"
    out: str = "replicated"
    bias: bool = False
    weight: str = "plain"  # none, plain, offset or cast
    in_slot: bool = False  # x is this rank's staging buffer
    hidden: int = HIDDEN
    dtype: torch.dtype = torch.float32
    fp8: bool = False

    @property
    def name(self) -> str:
        of_rows = (self.hidden, self.dtype)
        end = "" if of_rows == (HIDDEN, torch.float32) else f"-{self.hidden}-{str(self.dtype).split('.')[1]}"
        end += "-fp8" * self.fp8 + "-in-slot" * self.in_slot
        bias = "-bias" if self.bias else ""
        return f"t{self.tokens}-g{self.grid}-{self.residual}-{self.out}-{self.weight}{bias}{end}"


# Consecutive cases run on one slot: grids of different sizes follow each other, and the epochs cross 2**31 on the way.
CASES = [
    Case(tokens, grid, residual, out)
    for residual in ("none", "full", "sharded")
    for out in ("none", "sharded", "replicated")
    for tokens, grid in ((1, 1), (3, 2), (7, 1), (7, 3))
] + [Case(5, 2, bias=True, weight=weight) for weight in ("none", "plain", "offset", "cast")]
CASES += [
    Case(tokens, grid, residual, out, residual == "none", hidden=hidden, dtype=dtype)
    for hidden, dtype in ((20, torch.float32), (HIDDEN, torch.bfloat16), (40, torch.float16))
    for residual, out in (("none", "replicated"), ("full", "sharded"), ("sharded", "replicated"), ("full", "none"))
    for tokens, grid in ((1, 1), (7, 3))
]
CASES += [Case(7, 3, out=out, fp8=fp8, in_slot=not fp8) for out in ("none", "replicated") for fp8 in (True, False)]


def expected(case: Case, inputs: list[torch.Tensor], extras: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """``(hidden, h)`` in float64."""
    total = torch.stack(inputs).double().sum(0)
    residual = None if case.residual == "none" else extras["residual"]
    bias = extras["bias"] if case.bias else None
    norm = dataclasses.replace(norm_of(case), hidden_dtype=torch.float64, residual_dtype=torch.float64)
    return add_rms_norm(total, residual, bias, None if case.weight == "none" else extras["weight"], norm)


def unfused(case: Case, inputs: list[torch.Tensor], extras: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """``(hidden, h)`` by operators that each round to the case's dtype."""
    h = torch.stack(inputs).sum(0)
    if case.bias:
        h = h + extras["bias"]
    if case.residual != "none":
        h = h + extras["residual"]
    scale = extras["scale"] if case.fp8 else None
    return add_rms_norm(h, None, None, None if case.weight == "none" else extras["weight"], norm_of(case), scale)


def norm_of(case: Case) -> NormSpec:
    cast = torch.float32 if case.weight == "cast" else None
    hidden_dtype = torch.float8_e4m3fn if case.fp8 else case.dtype
    return NormSpec(1e-5, 1.0 if case.weight == "offset" else 0.0, cast, hidden_dtype, case.dtype)


def inputs_of(case: Case) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    x = [normal(case.tokens, case.hidden) * (rank + 1) for rank in range(WORLD_SIZE)]
    extras = {"residual": normal(case.tokens, case.hidden)}
    extras |= {name: normal(case.hidden) for name in ("bias", "weight")} | {"scale": torch.tensor([0.013])}
    return x, extras


def within_error(case: Case, name: str, actual: torch.Tensor, wanted: torch.Tensor, unfused: torch.Tensor) -> None:
    """Rounding errors only, in float32; for 16-bit types as near to float64 as the unfused operators are."""
    if case.dtype == torch.float32:
        torch.testing.assert_close(actual, wanted.float(), rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")
    else:
        assert_within_budget(actual, unfused, wanted)


def table(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Addresses of the ranks' shared tensors; they differ between processes, as peer mappings do."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def bytes_beyond(case: Case, buffer: torch.Tensor) -> torch.Tensor:
    """A copy of what follows the message in ``buffer``."""
    return buffer.view(torch.uint8).flatten()[case.tokens * case.hidden * case.dtype.itemsize :].clone()


def run_case(case: Case, rank: int, shared: dict[str, list[torch.Tensor]], state: dict[str, torch.Tensor]) -> None:
    """Launch ``case`` on this rank and compare with the definition; AssertionError says what differs."""
    from tw_compile.kernels.algorithms.two_shot.kernel import all_reduce_rms_norm_kernel
    from tw_compile.kernels.collective.row import launch_shape, normalise_row, triton_dtype

    inputs, extras = inputs_of(case)
    norm = norm_of(case)
    per_rank = rows_per_rank(case.tokens, WORLD_SIZE)
    begin, end = row_range(case.tokens, WORLD_SIZE, rank)
    residual = None
    if case.residual == "full":
        residual = extras["residual"]
    elif case.residual == "sharded":
        residual = torch.full((per_rank, case.hidden), float("nan"), dtype=case.dtype)
        residual[: end - begin] = extras["residual"][begin:end]
    rows = {"none": 0, "sharded": per_rank, "replicated": case.tokens}[case.out]
    hidden, residual_out = (
        torch.full((count, case.hidden), float("nan"), dtype=dtype)
        for count, dtype in ((case.tokens, norm.hidden_dtype), (rows, norm.residual_dtype))
    )
    # Peers write here only once this rank has arrived at the first barrier, so nobody does before the launch or after it.
    beyond = {name: bytes_beyond(case, shared[name][rank]) for name in ("staging", "hidden", "residual")}
    x = inputs[rank]
    if case.in_slot:
        x = shared["staging"][rank].flatten()[: x.numel()].view(x.shape).copy_(x)
    all_reduce_rms_norm_kernel[(case.grid,)](
        x,
        residual,
        extras["bias"] if case.bias else None,
        None if case.weight == "none" else extras["weight"],
        None,
        hidden,
        residual_out,
        extras["scale"] if case.fp8 else None,
        table(shared["staging"]),
        table(shared["hidden"]),
        table(shared["residual"]) if case.out == "replicated" else None,
        table(shared["pads"]),
        state["epochs"],
        state["status"],
        rank,
        case.tokens,
        norm.eps,
        norm.weight_offset,
        norm.scale,
        HIDDEN=case.hidden,
        BLOCK=launch_shape(case.hidden)[0],
        WORLD_SIZE=WORLD_SIZE,
        STAGED=not case.in_slot,
        RESIDUAL_SHARDED=case.residual == "sharded",
        RESIDUAL_OUT=case.out,
        CAST_BEFORE_WEIGHT=triton_dtype(norm.cast_before_weight),
        NORMALISE=normalise_row,
        SPIN_LIMIT=0,
    )
    (want_hidden, want_h), (base_hidden, base_h) = expected(case, inputs, extras), unfused(case, inputs, extras)
    if case.fp8:
        scale = float(extras["scale"])
        of_hidden = hidden.float() * scale, base_hidden.float() * scale, want_hidden.clamp(-448 * scale, 448 * scale)
        assert_within_budget(*of_hidden)
    else:
        within_error(case, "hidden", hidden, want_hidden, base_hidden)
    if case.out == "replicated":
        within_error(case, "residual", residual_out, want_h, base_h)
    elif case.out == "sharded" and begin < end:
        within_error(case, "residual", residual_out[: end - begin], want_h[begin:end], base_h[begin:end])
    for name, before in beyond.items():
        assert torch.equal(bytes_beyond(case, shared[name][rank]), before), f"{name}: written beyond the last row"


def launch_alone(grid: int, shared: dict[str, list[torch.Tensor]], state: dict[str, torch.Tensor]) -> None:
    """A call that only rank 0 takes part in, with barriers that give up."""
    from tw_compile.kernels.algorithms.two_shot.kernel import all_reduce_rms_norm_kernel
    from tw_compile.kernels.collective.row import normalise_row

    all_reduce_rms_norm_kernel[(grid,)](
        torch.ones(4, HIDDEN),
        *(None, None, None, None),
        torch.empty(4, HIDDEN),
        torch.empty(0, HIDDEN),
        None,
        table(shared["staging"]),
        table(shared["hidden"]),
        None,
        table(shared["pads"]),
        state["epochs"],
        state["status"],
        *(0, 4, 1e-6, 0.0, 1.0),
        HIDDEN=HIDDEN,
        BLOCK=64,
        WORLD_SIZE=WORLD_SIZE,
        STAGED=True,
        RESIDUAL_SHARDED=False,
        RESIDUAL_OUT="none",
        CAST_BEFORE_WEIGHT=None,
        NORMALISE=normalise_row,
        SPIN_LIMIT=20,
    )


def run_lost_peer(rank: int, shared: dict[str, list[torch.Tensor]], state: dict[str, torch.Tensor]) -> None:
    """Only rank 0 launches: its barriers must give up, and the host must be told who was missing."""
    from tw_compile.kernels.runtime import barrier

    if rank != 0:
        return
    barrier.raise_if_peer_missing(state["status"], 0, "here")  # nothing to report so far
    launch_alone(2, shared, state)
    assert state["status"].nonzero().tolist() == [[0, 1], [1, 1]]
    with pytest.raises(
        RuntimeError, match=r"group g, slot 3: rank 0, CTA 0 gave up waiting for rank 1 at barrier 1 of"
    ):
        barrier.raise_if_peer_missing(state["status"], 0, "group g, slot 3")


def run_wrap_around(rank: int, shared: dict[str, list[torch.Tensor]], state: dict[str, torch.Tensor]) -> None:
    """The second barrier of this launch is number 2**31, stored as -2**31: larger than 2**31 - 1 for all that."""
    if rank != 0:
        return
    for announced, silent_at in ((2**31 - 2, 1), (2**31 - 1, 2), (-(2**31), 0), (-(2**31) + 1, 0)):
        state["epochs"].fill_(2**31 - 2)
        state["status"].zero_()
        shared["pads"][0].fill_(announced)
        launch_alone(1, shared, state)
        assert int(state["status"][0, 1]) == silent_at, f"peer announced {announced}"


def let_interpreter_index_with_tensors() -> None:
    """Triton 3.6's interpreter turns loop bounds into ints in a way that numpy >= 2.4 refuses; later ones don't."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def let_interpreter_round() -> None:
    """Triton's interpreter truncates float32 to bfloat16, and loses the carry of float8's mantissa, where GPUs round."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        rounded = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}
        if source != tl.float32 or target not in rounded:
            return original(values, source, target, rounding)
        dtype, bits = rounded[target]
        numbers = torch.from_numpy(np.frombuffer(values.tobytes(), np.float32).copy())
        return numbers.to(dtype).view(bits).numpy().reshape(values.shape)

    interpreter._convert_float = convert


def interpreter_worker(rank: int, shared: dict[str, list[torch.Tensor]], results: Any) -> None:
    """Run everything in order; both ranks make the same sequence of launches."""
    torch.set_num_threads(1)
    let_interpreter_index_with_tensors()
    let_interpreter_round()
    from tw_compile.kernels.runtime import barrier

    start = 2**31 - 20
    state = {
        "epochs": torch.full((barrier.MAX_CTAS,), start, dtype=torch.int32),
        "status": torch.zeros((barrier.MAX_CTAS, barrier.MAX_WORLD_SIZE), dtype=torch.int32),
    }
    checks: list[tuple[str, Any]] = [(case.name, partial(run_case, case, rank, shared, state)) for case in CASES]
    checks.append(("epochs", partial(check_epochs, state["epochs"], start)))
    checks.append(("lost-peer", partial(run_lost_peer, rank, shared, state)))
    checks.append(("wrap-around", partial(run_wrap_around, rank, shared, state)))
    for name, check in checks:
        try:
            check()
            results.put((rank, name, "ok"))
        except Exception:
            results.put((rank, name, traceback.format_exc()))


def check_epochs(epochs: torch.Tensor, start: int) -> None:
    """Each CTA counted two barriers for every launch that it was part of."""
    grids = [case.grid for case in CASES]
    for cta in range(4):
        passed = 2 * sum(grid > cta for grid in grids)
        assert (int(epochs[cta]) - (start + passed)) % 2**32 == 0
    assert int(epochs[0]) < 0  # the cases did cross 2**31


@pytest.fixture(scope="module")
def interpreted() -> Iterator[dict[tuple[int, str], str]]:
    """(rank, check) -> "ok" or a traceback, of two processes that run the kernels in Triton's interpreter."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    pad = torch.full((32, 8), 2**31 - 20, dtype=torch.int32)
    shared = {
        name: [make().share_memory_() for _ in range(WORLD_SIZE)]
        for name, make in {
            "staging": lambda: torch.full((16, HIDDEN), float("nan")),
            "hidden": lambda: torch.full((16, HIDDEN), float("nan")),
            "residual": lambda: torch.full((16, HIDDEN), float("nan")),
            "pads": pad.clone,
        }.items()
    }
    results = context.Queue()
    previous = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # read when the child imports Triton
    try:
        workers = [
            context.Process(target=interpreter_worker, args=(rank, shared, results)) for rank in range(WORLD_SIZE)
        ]
        for worker in workers:
            worker.start()
    finally:
        if previous is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = previous
    seen: dict[tuple[int, str], str] = {}
    try:
        while len(seen) < WORLD_SIZE * len(CHECK_NAMES):
            rank, name, outcome = results.get(timeout=WORKER_SECONDS)
            seen[rank, name] = outcome
    except queue.Empty:
        print(f"workers stopped reporting after {len(seen)} checks", file=sys.stderr)
    for worker in workers:
        worker.join(timeout=5)
        if worker.is_alive():
            worker.kill()
    yield seen


CHECK_NAMES = [case.name for case in CASES] + ["epochs", "lost-peer", "wrap-around"]


@pytest.mark.full
@pytest.mark.parametrize("name", CHECK_NAMES)
def test_interpreted(interpreted: dict[tuple[int, str], str], name: str) -> None:
    for rank in range(WORLD_SIZE):
        outcome = interpreted.get((rank, name), "no report: the worker hung or died")
        assert outcome == "ok", f"rank {rank}: {outcome}"
