"""The two-shot kernel without a GPU: compiled for sm_90 and sm_100, and interpreted by Triton in two processes."""

from __future__ import annotations

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

from tw_compile.kernels.all_reduce_rms_norm.reference import add_rms_norm
from tw_compile.kernels.all_reduce_rms_norm.spec import NormSpec, row_range, rows_per_rank

WORLD_SIZE = 2
HIDDEN = 48  # not a power of two, rows of 192 bytes
WORKER_SECONDS = 50


# --- compile only ----------------------------------------------------------------------------------------------------


def compile_all_reduce(arch: int, hidden_size: int, world_size: int, **overrides: Any) -> Any:
    """The kernel compiled for compute capability ``arch``; ``overrides`` replace argument types or constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tw_compile.kernels.all_reduce_rms_norm.p2p_kernel import all_reduce_rms_norm_kernel as kernel
    from tw_compile.kernels.all_reduce_rms_norm.row import launch_shape

    block, num_warps = launch_shape(hidden_size)
    arguments: dict[str, Any] = dict.fromkeys(("x", "residual", "bias", "weight", "hidden", "residual_out"), "*bf16")
    arguments |= dict.fromkeys(("staging_table", "hidden_table", "residual_table", "pads"), "*i64")
    arguments |= {"epochs": "*i32", "status": "*i32", "rank": "i32", "tokens": "i32"}
    arguments |= {"eps": "fp32", "weight_offset": "fp32", "scale": "fp32"}
    arguments |= {"HIDDEN": hidden_size, "BLOCK": block, "WORLD_SIZE": world_size}
    arguments |= {"RESIDUAL_SHARDED": False, "RESIDUAL_OUT": "replicated", "CAST_BEFORE_WEIGHT": None, "SPIN_LIMIT": 0}
    arguments |= overrides
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
]


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
    """The memory-order argument rests on it; see ``tw_compile.kernels._sync``."""
    import triton

    cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compile_all_reduce(90, 8192, 4).asm["cubin"])
    sass = subprocess.run([cuobjdump, "-sass", binary], capture_output=True, text=True, check=True, timeout=60).stdout
    order = re.findall(r"\b(MEMBAR\.\w+\.SYS|ATOMG\.E\.EXCH\.STRONG\.SYS|ATOMG\.E\.ADD\.STRONG\.SYS|CCTL\.IVALL)", sass)
    assert "ATOMG.E.EXCH.STRONG.SYS" in order
    for index, operation in enumerate(order):
        if "EXCH" in operation:
            assert order[index - 1].startswith("MEMBAR")
        if "ADD" in operation:
            assert order[index + 1] == "CCTL.IVALL"
    assert "LDG.E.128" in sass and "STG.E.128" in sass


def test_grid_and_capacity_depend_on_shapes_only() -> None:
    from tw_compile.kernels._sync import MAX_CTAS
    from tw_compile.kernels.all_reduce_rms_norm.p2p import MIN_CAPACITY_BYTES, capacity_for, grid_size

    assert [grid_size(tokens, 4) for tokens in (1, 4, 5, 65536)] == [1, 1, 2, MAX_CTAS]
    assert capacity_for(1) == MIN_CAPACITY_BYTES
    assert capacity_for(MIN_CAPACITY_BYTES + 1) == 2 * MIN_CAPACITY_BYTES


def test_spin_limit_is_validated() -> None:
    from tw_compile.kernels._sync import spin_limit

    assert spin_limit({}) == 0
    assert spin_limit({"TW_COMPILE_SPIN_LIMIT": "5000"}) == 5000
    for text in ("-1", "many", "1e6", str(2**31)):
        with pytest.raises(ValueError, match="TW_COMPILE_SPIN_LIMIT"):
            spin_limit({"TW_COMPILE_SPIN_LIMIT": text})


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

    @property
    def name(self) -> str:
        return f"t{self.tokens}-g{self.grid}-{self.residual}-{self.out}-{self.weight}{'-bias' if self.bias else ''}"


# Consecutive cases run on one slot: grids of different sizes follow each other, and the epochs cross 2**31 on the way.
CASES = [
    Case(tokens, grid, residual, out)
    for residual in ("none", "full", "sharded")
    for out in ("none", "sharded", "replicated")
    for tokens, grid in ((1, 1), (3, 2), (7, 1), (7, 3))
] + [Case(5, 2, bias=True, weight=weight) for weight in ("none", "plain", "offset", "cast")]


def expected(case: Case, inputs: list[torch.Tensor], extras: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    total = torch.stack(inputs).double().sum(0)
    residual = None if case.residual == "none" else extras["residual"].double()
    return add_rms_norm(
        total,
        residual,
        extras["bias"].double() if case.bias else None,
        None if case.weight == "none" else extras["weight"].double(),
        norm_of(case),
    )


def norm_of(case: Case) -> NormSpec:
    cast = torch.float32 if case.weight == "cast" else None
    return NormSpec(1e-5, 1.0 if case.weight == "offset" else 0.0, cast, torch.float32, torch.float32)


def inputs_of(case: Case) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    x = [torch.randn(case.tokens, HIDDEN, generator=generator) * (rank + 1) for rank in range(WORLD_SIZE)]
    extras = {"residual": torch.randn(case.tokens, HIDDEN, generator=generator)}
    extras |= {name: torch.randn(HIDDEN, generator=generator) for name in ("bias", "weight")}
    return x, extras


def table(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Addresses of the ranks' shared tensors; they differ between processes, as peer mappings do."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def run_case(case: Case, rank: int, shared: dict[str, list[torch.Tensor]], state: dict[str, torch.Tensor]) -> None:
    """Launch ``case`` on this rank and compare with the definition; AssertionError says what differs."""
    from tw_compile.kernels.all_reduce_rms_norm.p2p_kernel import all_reduce_rms_norm_kernel
    from tw_compile.kernels.all_reduce_rms_norm.row import launch_shape, triton_dtype

    inputs, extras = inputs_of(case)
    norm = norm_of(case)
    per_rank = rows_per_rank(case.tokens, WORLD_SIZE)
    begin, end = row_range(case.tokens, WORLD_SIZE, rank)
    residual = None
    if case.residual == "full":
        residual = extras["residual"]
    elif case.residual == "sharded":
        residual = torch.full((per_rank, HIDDEN), float("nan"))
        residual[: end - begin] = extras["residual"][begin:end]
    rows = {"none": 0, "sharded": per_rank, "replicated": case.tokens}[case.out]
    hidden, residual_out = (torch.full((count, HIDDEN), float("nan")) for count in (case.tokens, rows))
    all_reduce_rms_norm_kernel[(case.grid,)](
        inputs[rank],
        residual,
        extras["bias"] if case.bias else None,
        None if case.weight == "none" else extras["weight"],
        hidden,
        residual_out,
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
        HIDDEN=HIDDEN,
        BLOCK=launch_shape(HIDDEN)[0],
        WORLD_SIZE=WORLD_SIZE,
        RESIDUAL_SHARDED=case.residual == "sharded",
        RESIDUAL_OUT=case.out,
        CAST_BEFORE_WEIGHT=triton_dtype(norm.cast_before_weight),
        SPIN_LIMIT=0,
    )
    want_hidden, want_h = expected(case, inputs, extras)
    torch.testing.assert_close(hidden, want_hidden, rtol=1e-5, atol=1e-5)
    if case.out == "replicated":
        torch.testing.assert_close(residual_out, want_h, rtol=1e-5, atol=1e-5)
    elif case.out == "sharded":
        torch.testing.assert_close(residual_out[: end - begin], want_h[begin:end], rtol=1e-5, atol=1e-5)


def launch_alone(grid: int, shared: dict[str, list[torch.Tensor]], state: dict[str, torch.Tensor]) -> None:
    """A call that only rank 0 takes part in, with barriers that give up."""
    from tw_compile.kernels.all_reduce_rms_norm.p2p_kernel import all_reduce_rms_norm_kernel

    all_reduce_rms_norm_kernel[(grid,)](
        torch.ones(4, HIDDEN),
        None,
        None,
        None,
        torch.empty(4, HIDDEN),
        torch.empty(0, HIDDEN),
        table(shared["staging"]),
        table(shared["hidden"]),
        None,
        table(shared["pads"]),
        state["epochs"],
        state["status"],
        0,
        4,
        1e-6,
        0.0,
        1.0,
        HIDDEN=HIDDEN,
        BLOCK=64,
        WORLD_SIZE=WORLD_SIZE,
        RESIDUAL_SHARDED=False,
        RESIDUAL_OUT="none",
        CAST_BEFORE_WEIGHT=None,
        SPIN_LIMIT=20,
    )


def run_lost_peer(rank: int, shared: dict[str, list[torch.Tensor]], state: dict[str, torch.Tensor]) -> None:
    """Only rank 0 launches: its barriers must give up, and the host must be told who was missing."""
    from tw_compile.kernels import _sync

    if rank != 0:
        return
    _sync.raise_if_peer_missing(state["status"], 0, "here")  # nothing to report so far
    launch_alone(2, shared, state)
    assert state["status"].nonzero().tolist() == [[0, 1], [1, 1]]
    with pytest.raises(
        RuntimeError, match=r"group g, slot 3: rank 0, CTA 0 gave up waiting for rank 1 at barrier 1 of"
    ):
        _sync.raise_if_peer_missing(state["status"], 0, "group g, slot 3")


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


def interpreter_worker(rank: int, shared: dict[str, list[torch.Tensor]], results: Any) -> None:
    """Run everything in order; both ranks make the same sequence of launches."""
    torch.set_num_threads(1)
    let_interpreter_index_with_tensors()
    from tw_compile.kernels import _sync

    start = 2**31 - 20
    state = {
        "epochs": torch.full((_sync.MAX_CTAS,), start, dtype=torch.int32),
        "status": torch.zeros((_sync.MAX_CTAS, _sync.MAX_WORLD_SIZE), dtype=torch.int32),
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


@pytest.mark.parametrize("name", CHECK_NAMES)
def test_interpreted(interpreted: dict[tuple[int, str], str], name: str) -> None:
    for rank in range(WORLD_SIZE):
        outcome = interpreted.get((rank, name), "no report: the worker hung or died")
        assert outcome == "ok", f"rank {rank}: {outcome}"
