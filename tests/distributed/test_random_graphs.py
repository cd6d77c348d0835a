"""2,000 random graphs: what the passes make of each computes the same, or is the same graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from graph_builder import copy_of, metadata, propagated_metadata, run_graph
from random_graphs import Groups, random_graph, random_inputs

from tw_compile import Config, TWCompilePass, collect_reports
from tw_compile.testing import GlooRanks, count_ops, snapshot

GRAPHS = 2000
FEW = 100
ABSORBED = ("mm_all_reduce_rms_norm_start", "mm_all_reduce_layer_norm_start")
_SECOND: dict[int, Groups] = {}


@dataclass(frozen=True)
class Outcome:
    seed: int
    fused: int
    absorbed: int
    reasons: tuple[str, ...]
    failure: str


def groups_of_this_process() -> Groups:
    """Created once per worker: every rank makes the same groups in the same order."""
    rank = dist.get_rank()
    if rank not in _SECOND:
        ranks = list(range(dist.get_world_size()))
        second = dist.new_group(ranks)
        singles = [dist.new_group([one]) for one in ranks]
        _SECOND[rank] = Groups(dist.group.WORLD.group_name, second.group_name, singles[rank].group_name)
    return _SECOND[rank]


def check_seed(seed: int, rank: int, groups: Groups) -> Outcome:
    made = random_graph(seed, groups)
    original, rewritten = made.graph, copy_of(made.graph)
    passes = TWCompilePass(Config(strict=True, absorb_mm="always" if seed // 8 % 2 else "auto"))
    with collect_reports() as reports:
        passes(rewritten)
    rewritten.lint()
    (report,) = reports
    counts, failures = report.counts, []
    before, after = snapshot(original), snapshot(rewritten)
    if counts["fused"] == 0 and after != before:
        failures.append("nothing was fused, yet the graph changed")
    if count_ops(rewritten, "all_reduce") != counts["refused"]:
        failures.append(f"{count_ops(rewritten, 'all_reduce')} all_reduces are left, {counts}")
    absorbed = sum(site.producer == "mm" for site in report.sites)
    absorbing = sum(count_ops(rewritten, name) for name in ABSORBED)
    if (count_ops(original, "mm") - count_ops(rewritten, "mm"), absorbing) != (absorbed, absorbed):
        failures.append(f"{absorbed} GEMMs were to be absorbed")
    if seed % 8 == 0:
        pairs = zip(propagated_metadata(rewritten), metadata(rewritten), strict=True)
        failures += [f"propagated {a}, noted {b}" for a, b in pairs if a != b]
        again = copy_of(rewritten)
        passes(again)
        failures += ["a second run changed the graph"] * (snapshot(again) != after)
    inputs = random_inputs(made, seed, rank)
    expected, actual = run_graph(original, inputs), run_graph(rewritten, inputs)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        difference = (a.double() - b.double()).abs().max().item()
        if a.shape != b.shape or a.dtype != b.dtype:
            failures.append(f"output {index} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}")
        elif not difference <= made.tolerance * (1 + b.double().abs().max().item()):
            failures.append(f"output {index} differs by {difference:.2e}")
    failure = "\n".join([f"seed {seed}, rank {rank}:", *failures, before, "->", after]) if failures else ""
    return Outcome(seed, counts["fused"], absorbed, tuple(site.reason for site in report.sites if site.reason), failure)


def check_seeds(rank: int, begin: int, end: int) -> list[Outcome]:
    groups = groups_of_this_process()
    with torch.no_grad():
        return [checked(seed, rank, groups) for seed in range(begin, end)]


def checked(seed: int, rank: int, groups: Groups) -> Outcome:
    try:
        return check_seed(seed, rank, groups)
    except Exception as error:
        text = snapshot(random_graph(seed, groups).graph)
        raise AssertionError(f"seed {seed}, rank {rank}:\n{text}") from error


@pytest.fixture(scope="module")
def outcomes(gloo_ranks: GlooRanks) -> list[Outcome]:
    return [outcome for per_rank in gloo_ranks.run(check_seeds, 0, GRAPHS) for outcome in per_rank]


def assert_all_good(outcomes: list[Outcome]) -> None:
    failures = [outcome for outcome in outcomes if outcome.failure]
    assert not failures, f"seeds {sorted({one.seed for one in failures})}\n{failures[0].failure}"


def assert_alike(first: list[Outcome], second: list[Outcome]) -> None:
    for one, other in zip(first, second, strict=True):
        assert (one.fused, one.absorbed, one.reasons) == (other.fused, other.absorbed, other.reasons)


def test_the_first_of_them(gloo_ranks: GlooRanks) -> None:
    first, second = gloo_ranks.run(check_seeds, 0, FEW)
    assert_all_good([*first, *second])
    assert_alike(first, second)
    assert sum(one.fused > 0 for one in first) > 0.3 * FEW and sum(one.absorbed > 0 for one in first) > 0.1 * FEW


@pytest.mark.full
def test_rewritten_graph_computes_the_same_or_is_untouched(outcomes: list[Outcome]) -> None:
    assert_all_good(outcomes)


@pytest.mark.full
def test_ranks_decide_alike(outcomes: list[Outcome]) -> None:
    assert_alike(outcomes[:GRAPHS], outcomes[GRAPHS:])


@pytest.mark.full
def test_graphs_have_teeth(outcomes: list[Outcome]) -> None:
    graphs = outcomes[:GRAPHS]
    reasons = Counter(reason for one in graphs for reason in one.reasons)
    assert sum(one.fused > 0 for one in graphs) > 0.3 * GRAPHS
    assert sum(bool(one.reasons) for one in graphs) > 0.2 * GRAPHS
    assert sum(one.fused > 0 and bool(one.reasons) for one in graphs) > 0.1 * GRAPHS
    assert len(reasons) >= 10, reasons
    assert sum(one.absorbed > 0 for one in graphs) > 0.1 * GRAPHS
