"""Lines of the kernels that must be as they are: with another in its place, the tests of the kernels fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from emulator import EmulationError
from emulator.kernels import ALGORITHMS, FP8, FP32, Form, MultimemMachine, PushMachine, StreamMachine
from emulator.test_kernels import MOST_TOKENS, WHOLE, random_calls
from tw_compile.kernels.algorithms.multimem.multimem import Shape as MultimemShape
from tw_compile.kernels.algorithms.stream.stream import Shape
from tw_compile.kernels.runtime.program import HEADERS

Run = Callable[[Path | None, int], None]
SEEDS = range(40)
TWO_GROUPS = Shape(64, 2, 2)
GROUPS_WITH_ROWS_AHEAD = MultimemShape(64, 2, 2)
STALL_LIMIT = 20_000  # enough for 400 rounds of all threads


def run_push(
    sources: Path | None, seed: int, *, one_shot: bool, world_size: int = 3, form: Form = WHOLE, cluster: int = 1
) -> None:
    options: dict[str, Any] = {"threads": 64 // cluster, "stall_limit": STALL_LIMIT, "sources": sources}
    options |= {"resident": cluster * (2 + seed % 5), "cluster": cluster}
    machine = PushMachine(world_size, 264, form, one_shot=one_shot, most_tokens=MOST_TOKENS, seed=seed, **options)
    random_calls(machine, seed, 6)
    machine.run()


def run_stream(
    sources: Path | None, seed: int, *, form: Form = WHOLE, in_slot: bool = False, shape: Shape = TWO_GROUPS
) -> None:
    options: dict[str, Any] = {"staged": not in_slot, "private_output": not in_slot, "shape": shape}
    options |= {"first_epoch": -3, "resident": 2 + seed % 5, "stall_limit": STALL_LIMIT, "sources": sources}
    machine = StreamMachine(3, 272, form, most_tokens=MOST_TOKENS, seed=seed, **options)
    random_calls(machine, seed, 4)
    machine.run()


def run_multimem(
    sources: Path | None,
    seed: int,
    *,
    form: Form = WHOLE,
    in_slot: bool = False,
    by_peers: bool = False,
    shape: MultimemShape = GROUPS_WITH_ROWS_AHEAD,
) -> None:
    options: dict[str, Any] = {
        "staged": not in_slot,
        "private_output": not in_slot,
        "shape": shape,
        "by_peers": by_peers,
    }
    options |= {"first_epoch": -3, "resident": 2 + seed % 5, "stall_limit": STALL_LIMIT, "sources": sources}
    machine = MultimemMachine(3, 272, form, most_tokens=MOST_TOKENS, seed=seed, **options)
    random_calls(machine, seed, 4)
    machine.run()


SHARDED = Form(residual="sharded", residual_out="sharded", residual_dtype=FP32)
ONE_SHOT, TWO_SHOT = partial(run_push, one_shot=True), partial(run_push, one_shot=False)
CLUSTERS, TWO_SHOT_CLUSTERS = (partial(run_push, one_shot=one_shot, cluster=2) for one_shot in (True, False))
MEETING, NO_MEETING = "meet_peers(p.pads, p.status, epoch + {0}, p.rank, {0}, BLOCK)", "barrier_sync(0, BLOCK)"
PRIVATE, IN_SLOT = run_stream, partial(run_stream, in_slot=True)
BY_PEERS = partial(run_multimem, by_peers=True)
MULTIMEM_IN_SLOT = partial(run_multimem, in_slot=True)

PUSH: dict[str, tuple[Run, str, str]] = {
    "clears the part that comes next": (TWO_SHOT, "call.part == 0 ? PARTS - 1 : call.part - 1", "(call.part + 1) % 3"),
    "clears nothing": (ONE_SHOT, "unit < used", "unit < 0"),
    "clears only while it computes": (TWO_SHOT, "  clear(used);", ""),
    "clears too little": (TWO_SHOT, "(uint32_t)(residuals.end() / 16)", "(uint32_t)(sums.end() / 16)"),
    "sections end off 16 bytes": (
        partial(run_push, one_shot=False, world_size=2, form=Form(hidden_dtype=FP8)),
        " + 15) / 16 * 16; }",
        "); }",
    ),
    "uses two parts": (ONE_SHOT, "PARTS = 3", "PARTS = 2"),
    "sends negative zeros of x": (ONE_SHOT, "if constexpr (!SumRow::CODED) drop_negative_zeros(own[v]);", ""),
    "sends negative zeros of results": (TWO_SHOT, "if constexpr (!ResultRow::CODED) drop_negative_zeros(result);", ""),
    "sends negative zeros of the residual": (
        partial(run_push, one_shot=False, form=Form(residual=None, residual_dtype=FP32, scale=-0.5)),
        "drop_negative_zeros(kept);",
        "",
    ),
    "rows share partial sums": (ONE_SHOT, "sets + next * WARPS", "sets"),
    "rows of clusters share partial sums": (CLUSTERS, "sets + next * WARPS", "sets"),
    "sums to CTAs without mbarriers": (CLUSTERS, "cluster_wait();  // the", "// the"),
    "waits for another row's sums": (CLUSTERS, "phase ^= next;", ""),
    "rows of clusters share an mbarrier": (CLUSTERS, "barriers + next;", "barriers;"),
    "does not wait for sums of the cluster": (
        CLUSTERS,
        "while (!mbarrier_try_wait(barrier, barrier_phase))",
        "while (false)",
    ),
    "CTAs take all columns of another number": (
        TWO_SHOT_CLUSTERS,
        "behind = local - BEHIND * stride",
        "behind = local - ctas",
    ),
    "a CTA gets no sums": (CLUSTERS, "thread % 32 < CLUSTER", "thread % 32 < CLUSTER - 1"),
    "CTAs of a cluster have rows of their own": (CLUSTERS, "p.begin + blockIdx.x / CLUSTER", "p.begin + blockIdx.x"),
    "counts clusters": (CLUSTERS, "to_next_part(part, ctas)", "to_next_part(part, stride)"),
    "a peer gets no results": (
        TWO_SHOT,
        "PEERS; ++step) call.push(normalised",
        "PEERS - 1; ++step) call.push(normalised",
    ),
    "first CTA moves the state on": (
        ONE_SHOT,
        "one + (blockIdx.x == 0 ? to_next_part(part, ctas) : 0)",
        "blockIdx.x == 0 ? to_next_part(part, 0) : 0",
    ),
    "first CTA of a cluster moves the state on": (
        CLUSTERS,
        "one + (blockIdx.x == 0 ? to_next_part(part, ctas) : 0)",
        "blockIdx.x % CLUSTER == 0 ? one + (blockIdx.x == 0 ? to_next_part(part, stride) : 0) : 0",
    ),
    "moves the state on before other threads have read it": (
        ONE_SHOT,
        "one = barrier_sync_with(0, THREADS, used)",
        "one = 1",
    ),
    "counts CTAs in each turn": (TWO_SHOT, "if (ahead == first) move_on();", "move_on();"),
    "does not count a CTA": (TWO_SHOT, "if (ahead == first) move_on();", "if (ahead == p.begin) move_on();"),
    "takes a phase for its part": (ONE_SHOT, "smaller(phase / ONE_PART, PARTS - 1)", "phase / ONE_PART % PARTS"),
    "starts before the call before has ended": (ONE_SHOT, "grid_dependency_wait();", ""),
    "adds in another order on each rank": (
        partial(run_push, one_shot=True, form=Form(FP32, residual_dtype=FP32)),
        "if (peer_after(rank, section) == source)",
        "if (section + 1 == source)",
    ),
    "reads a sharded residual as a whole one": (
        partial(run_push, one_shot=False, form=SHARDED),
        "(RESIDUAL_SHARDED ? local : row)",
        "row",
    ),
    "waits for rows that a peer does not have": (
        TWO_SHOT,
        "call.rows_of(peer_after(rank, section))",
        "call.rows_of(rank)",
    ),
}

STREAM: dict[str, tuple[Run, str, str]] = {
    "no barrier before the sum": (PRIVATE, MEETING.format(1), NO_MEETING),
    "no barrier before the slot is written": (
        IN_SLOT,
        MEETING.format(1),
        NO_MEETING,
    ),
    "no barrier after the sum": (IN_SLOT, MEETING.format(2), NO_MEETING),
    "counts one barrier": (PRIVATE, "p.epochs[blockIdx.x] = epoch + 2", "p.epochs[blockIdx.x] = epoch + 1"),
    "announces results that are on their way": (IN_SLOT, "    bulk_wait();\n    fence", "    fence"),
    "overwrites a result that is being copied": (
        partial(run_stream, shape=Shape(64, 2, 2)),
        "if (turn >= RESULTS) wait_for(&shared.taken[group][buffer], buffer_parity);",
        "",
    ),
    "gives a result back while it is being copied": (
        partial(run_stream, in_slot=True, shape=Shape(64, 1, 2, 2)),
        "bulk_wait_read<LAG>();\n      const int read",
        "const int read",
    ),
    "result not visible to bulk copies": (PRIVATE, "fence_proxy_async_shared();\n", ""),
    "copies a result that others still write": (
        PRIVATE,
        "wait_for(&shared.ready[group][turn % RESULTS], turn / RESULTS & 1);",
        "",
    ),
    "copies a result that other lanes still write": (
        PRIVATE,
        "warp_sync();\n      if (thread % 32 == 0) mbarrier_arrive",
        "if (thread % 32 == 0) mbarrier_arrive",
    ),
    "stages before the mbarriers are there": (PRIVATE, "barrier_sync(0, BLOCK);  // the mbarriers are there", ""),
    "announces rows that are being staged": (PRIVATE, "    bulk_wait();\n    return chunk;", "    return chunk;"),
    "fills a stage that is being read": (
        IN_SLOT,
        "if (round > 0) wait_for(&shared.empty[group][stage], (round - 1) & 1);",
        "",
    ),
    "reads a stage that is being filled": (PRIVATE, "wait_for(&shared.full[group][stage], stage_parity);", ""),
    "gives a stage back before all lanes have read it": (
        PRIVATE,
        "warp_sync();\n        if (thread % 32 == 0) mbarrier_arrive(&shared.empty",
        "if (thread % 32 == 0) mbarrier_arrive(&shared.empty",
    ),
    "mbarriers not visible to bulk copies": (IN_SLOT, "mbarrier_init_fence();", ""),
    "a peer gets no result": (
        IN_SLOT,
        "1; step < WORLD_SIZE; ++step)\n        bulk_store",
        "2; step < WORLD_SIZE; ++step)\n        bulk_store",
    ),
    "collects into a stage that is being stored": (PRIVATE, "bulk_wait_read<LAG>", "bulk_wait_read<LAG + 1>"),
    "collects twice from the first stage on": (PRIVATE, "p.residual_out, copied);", "p.residual_out, 0);"),
    "adds partial sums of squares that are not there yet": (
        PRIVATE,
        "wait_for(&shared.squared[group][turn & 1], turn / 2 & 1);",
        "",
    ),
    "rows share partial sums": (
        partial(run_stream, in_slot=True, shape=Shape(64, 1, 6, 3)),
        "shared.partials[turn & 1]",
        "shared.partials[0]",
    ),
    "groups share partial sums": (PRIVATE, "[group][thread / 32]", "[0][thread / 32]"),
    "reads a sharded residual as a whole one": (
        partial(run_stream, form=SHARDED),
        "(RESIDUAL_SHARDED ? local : row)",
        "row",
    ),
    "starts before the call before has ended": (PRIVATE, "grid_dependency_wait();", ""),
}

MULTIMEM: dict[str, tuple[Run, str, str]] = {
    "no barrier before the sum": (run_multimem, MEETING.format(1), NO_MEETING),
    "no barrier before the slot is written": (MULTIMEM_IN_SLOT, MEETING.format(1), NO_MEETING),
    "no barrier after the results": (MULTIMEM_IN_SLOT, MEETING.format(2), NO_MEETING),
    "no barrier before results are copied": (run_multimem, MEETING.format(2), NO_MEETING),
    "counts one barrier": (run_multimem, "p.epochs[blockIdx.x] = epoch + 2", "p.epochs[blockIdx.x] = epoch + 1"),
    "does not stage its own rows": (run_multimem, "copy_rows<0>", "copy_rows<1>"),
    "no alias fence before the sum": (run_multimem, "fence_proxy_alias();\n  cta.compute", "cta.compute"),
    "no alias fence before results are copied": (run_multimem, "fence_proxy_alias();\n  warp_sync", "warp_sync"),
    "takes a peer's address for the multicast one": (
        MULTIMEM_IN_SLOT,
        "multicast(table[WORLD_SIZE])",
        "multicast(table[0])",
    ),
    "a peer gets no result": (
        partial(run_multimem, in_slot=True, by_peers=True),
        "step < WORLD_SIZE; ++step)\n      store_relaxed_sys",
        "step < WORLD_SIZE - 1; ++step)\n      store_relaxed_sys",
    ),
    "leaves out a rank's addend": (
        BY_PEERS,
        "source < WORLD_SIZE; ++source",
        "source < WORLD_SIZE - 1; ++source",
    ),
    "has another row on its way": (
        run_multimem,
        "fetch(place, index + DEPTH * GROUPS)",
        "fetch(place, index + GROUPS)",
    ),
    "has no row on its way": (MULTIMEM_IN_SLOT, "fetch(place, index + DEPTH * GROUPS);", ""),
    "has rows of others on its way": (MULTIMEM_IN_SLOT, "if (index >= own_rows) return;", ""),
    "rows share partial sums": (
        partial(run_multimem, in_slot=True, shape=MultimemShape(64, 1, 2)),
        "(group * 2 + parity) * WARPS",
        "group * 2 * WARPS",
    ),
    "groups share partial sums": (MULTIMEM_IN_SLOT, "(group * 2 + parity) * WARPS", "parity * WARPS"),
    "groups share a barrier": (MULTIMEM_IN_SLOT, "thread, 1 + group)", "thread, 1)"),
    "neighbours put other halves together": (
        partial(run_multimem, form=Form(hidden_dtype=FP8)),
        "high = shuffle_xor(vectors[v].words[1], 1)",
        "high = shuffle_xor(vectors[v].words[1], 3)",
    ),
    "copies rows that are not there": (run_multimem, "local < share_of(owner) ?", "local < per_cta ?"),
    "copies one row of those that are at once": (
        run_multimem,
        "begin += AT_ONCE * GROUPS",
        "begin += (AT_ONCE + 1) * GROUPS",
    ),
    "does not copy the residual": (run_multimem, "copy_rows<1>(p.residual_out", "copy_rows<2>(p.residual_out"),
    "reads a sharded residual as a whole one": (
        partial(run_multimem, form=SHARDED),
        "(RESIDUAL_SHARDED ? local : row)",
        "row",
    ),
    "starts before the call before has ended": (run_multimem, "grid_dependency_wait();", ""),
}

PADS: dict[str, tuple[Run, str, str]] = {
    "announces what others have not written yet": (PRIVATE, "  barrier_sync(0, threads);\n  if", "  if"),
    "others go on before the peers have come": (
        PRIVATE,
        "  warp_sync();\n  barrier_sync(0, threads);\n",
        "  warp_sync();\n",
    ),
    "does not know one peer": (PRIVATE, "peer < WORLD_SIZE &&", "peer < WORLD_SIZE - 1 &&"),
    "count does not wrap": (PRIVATE, "(int32_t)(load_acquire_sys(flag) - epoch) < 0", "load_acquire_sys(flag) < epoch"),
}

ELEMENTS: dict[str, tuple[Run, str, str]] = {
    "one word speaks for others": (TWO_SHOT, "all = all && word != NOT_ARRIVED", "all = all || word != NOT_ARRIVED"),
    "negative zeros stay in upper halves": (ONE_SHOT, "0x80008000u", "0x00008000u"),
}

ROW: dict[str, tuple[Run, str, str]] = {
    "adds partial sums that are not there yet": (ONE_SHOT, "  barrier_sync(barrier, WARPS * 32);\n", ""),
    "reads past the end of a row": (ONE_SHOT, "OF_ROW % GROUP == 0", "true"),
}

BROKEN = {
    f"{file}: {name}": (file, *change)
    for file, changes in {
        "push.cu": PUSH,
        "stream.cu": STREAM,
        "multimem.cu": MULTIMEM,
        "pads.cuh": PADS,
        "elements.cuh": ELEMENTS,
        "row.cuh": ROW,
    }.items()
    for name, change in changes.items()
}


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught(tmp_path: Path, name: str) -> None:
    file, run, old, new = BROKEN[name]
    for source in (*ALGORITHMS.glob("*/*.cu"), *HEADERS.glob("*.cuh")):
        shutil.copy(source, tmp_path)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    with pytest.raises((EmulationError, AssertionError)):
        for seed in SEEDS:
            run(tmp_path, seed)


@pytest.mark.few(3)
@pytest.mark.parametrize("run", [ONE_SHOT, TWO_SHOT, PRIVATE, IN_SLOT, run_multimem, MULTIMEM_IN_SLOT, BY_PEERS])
def test_kernels_as_they_are_pass(run: Run) -> None:
    """What catches the broken ones lets these pass."""
    for seed in SEEDS[:10]:
        run(None, seed)
