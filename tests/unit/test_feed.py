"""GEMMs that are fed: which results they are fed, which not and why, and that a fed graph computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.fx as fx
from graph_builder import copy_of
from hypothesis import given
from hypothesis import strategies as st
from split_graphs import FUSED, WORLD_SIZE, family_graph, random_values, run_alone, sizes_of_symbols
from torch._inductor import config as inductor_config

from tw_compile import Config, TWCompilePass, compat
from tw_compile.current import current_gate
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.fed_mm import fed_gated_mm, fed_joint_mm
from tw_compile.kernels.collective.spec import row_range
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.gemm.fed import own_pairs
from tw_compile.models.config import load_config
from tw_compile.models.decoder import build_decoder
from tw_compile.passes import feed, manager
from tw_compile.passes.contract import Context
from tw_compile.passes.feed import FEED, feed_gemms
from tw_compile.passes.fusion import FusionDecisions
from tw_compile.passes.reasons import FeedRefusal
from tw_compile.passes.split import SplitReport
from tw_compile.passes.split.schedule.dependences import argument, find_calls
from tw_compile.planning import feeding
from tw_compile.planning.joint_tiles import BOX, WIDTHS
from tw_compile.report import Site
from tw_compile.testing import Rewritten, fake_cuda, fake_process_group, rewrite
from tw_compile.testing.graphs import find_ops

BF16 = torch.bfloat16
FAMILY = {"hidden_size": 64, "intermediate_size": 128, "dtype": BF16}


AUTO = replace(FUSED, feed_mm=Config().feed_mm)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    ops.in_flight.clear()
    ops.completed_early.clear()
    with fake_process_group(WORLD_SIZE):
        yield
    ops.in_flight.clear()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of all sizes are fed."""
    fed_from(monkeypatch, 1)


def fed_from(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """All GEMMs are fed from ``tokens`` tokens on."""
    for name in ("tokens_to_send", "tokens_to_fill"):
        monkeypatch.setattr(feeding, name, lambda *_: tokens)


@cache
def _traced(family: str, changes: tuple[tuple[str, Any], ...]) -> fx.Graph:
    return family_graph(family, 2, 8, **{**FAMILY, **dict(changes)})


def graph_of(family: str = "llama", **changes: Any) -> fx.Graph:
    return copy_of(_traced(family, tuple(changes.items())))


def reasons(graph: fx.Graph) -> list[str]:
    """Of each fused site, in graph order; ``fed`` where it is."""
    found = map(feed._refused, feed_gemms(graph, None).values())
    return ["fed" if one is None else str(one.reason) for one in found]


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_llama_is_fed_and_computes_the_same(short: None, dynamic: bool) -> None:
    """Two layers, behind the sums of the embeddings and of all but the last norm, whose result the graph returns."""
    graph = graph_of(dynamic=dynamic)
    values = random_values(graph, sizes_of_symbols(graph, 8))
    expected = run_alone(graph, values)
    found = reasons(graph)
    graph.lint()
    assert found.count("fed") == 4 and set(found) == {"fed", FeedRefusal.RESIDUAL_ON_ALL_RANKS}
    assert len(find_ops(graph, "fed_gated_mm")) == 2 and len(find_ops(graph, "fed_joint_mm")) == 2
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_fed_gemms_are_between_start_and_wait(short: None) -> None:
    graph = graph_of("qwen2")
    feed_gemms(graph, None)
    place = {node: index for index, node in enumerate(graph.nodes)}
    calls = find_calls(graph)
    assert isinstance(calls, list)
    by_hidden = {argument(call.wait, "hidden"): call for call in calls}
    fed = [node for name in ("fed_joint_mm", "fed_gated_mm") for node in find_ops(graph, name)]
    assert len(fed) == 4
    for node in fed:
        hidden: Any = node.args[0]
        call = by_hidden[hidden]
        assert place[call.start] < place[node] < place[call.wait]
        assert node.args[-2:] == call.slot
        assert {*hidden.users} == {node, call.wait}
    biases: Any = find_ops(graph, "fed_joint_mm")[0].args[2]
    assert len(biases) == 3, "q, k and v of Qwen 2 have biases"


def test_turns_of_rows_that_are_not_fed_are_measured(short: None) -> None:
    graph = graph_of()
    feed_gemms(graph, (1, 4096), lambda gemms, rows, device: (64, 2048))
    fed = [node for name in ("fed_joint_mm", "fed_gated_mm") for node in find_ops(graph, name)]
    assert [node.args[-3] for node in fed] == [[64, 2048]] * 4


def test_readers_that_are_no_gemms_of_ours_are_named(short: None) -> None:
    assert {*reasons(graph_of(dtype=torch.float32))} == {FeedRefusal.DTYPE_NOT_SUPPORTED}
    assert FeedRefusal.GEMM_NOT_OURS in reasons(graph_of(intermediate_size=132)), "columns that are no multiple of 8"


def test_a_single_gemm_is_left_to_the_library(short: None) -> None:
    """Phi-3 has queries, keys and values in one matrix, and gate and up in one."""
    graph = graph_of("phi3")
    found = reasons(graph)
    assert FeedRefusal.GEMM_ALONE in found and "fed" not in found
    assert not find_ops(graph, "fed_joint_mm")


@pytest.mark.full
def test_a_router_and_its_experts_are_not_fed(short: None) -> None:
    assert FeedRefusal.RESULT_USED_ELSEWHERE in reasons(graph_of("mixtral"))


def test_a_result_that_the_graph_returns_is_not_fed(short: None) -> None:
    graph = graph_of()
    calls = find_calls(graph)
    assert isinstance(calls, list)
    first = next(call for call in calls if argument(call.start, "residual_out") == "sharded")
    output = graph.output_node()
    output.args = ((*output.args[0], argument(first.wait, "hidden")),)  # type: ignore[misc]
    assert reasons(graph).count("fed") == 3


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("transport", "nccl", FeedRefusal.TRANSPORT_NOT_FED),
        ("wire", "int8", FeedRefusal.ROWS_IN_CODES),
        ("residual_out", "replicated", FeedRefusal.RESIDUAL_ON_ALL_RANKS),
    ],
)
def test_calls_that_cant_be_fed_are_refused_by_name(short: None, name: str, value: str, reason: str) -> None:
    graph = graph_of()
    before = [call.start for call in find_calls(graph) if isinstance(call.start, fx.Node)]  # type: ignore[union-attr]
    for start in before:
        names = [declared.name for declared in start.target._schema.arguments]  # type: ignore[union-attr]
        index = names.index(name)
        if index < len(start.args):
            start.update_arg(index, value)
        else:
            start.update_kwarg(name, value)
    assert reason in reasons(graph)
    assert not find_ops(graph, "fed_gated_mm")


def test_short_messages_are_not_fed() -> None:
    assert {*reasons(graph_of())} == {FeedRefusal.MESSAGE_TOO_SMALL}


def test_groups_that_gained_nothing_are_not_fed(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FED_UP_TO_RANKS", 1)
    assert {*reasons(graph_of())} == {FeedRefusal.GROUP_TOO_LARGE}


def context_of(config: Config) -> Context:
    context = Context(config, current_gate(config))
    context.keep(FusionDecisions((Site(0, 0, "form", "fused", "", None, "gloo"),)))
    return context


def sites(context: Context) -> tuple[Site, ...]:
    return context.needed(FusionDecisions).sites


def fed(graph: fx.Graph, context: Context) -> dict[str, int]:
    """What the pass counts, as the manager runs it."""
    (report,) = manager.run(graph, context, (FEED,)).reports
    return report.counts


def test_never_feeds_and_refuses_nothing(short: None) -> None:
    context = context_of(FUSED)
    assert not fed(graph_of(), context)
    assert sites(context)[0] == Site(0, 0, "form", "fused", "", None, "gloo")


def test_split_graphs_and_tuned_gemms_are_refused() -> None:
    context = context_of(AUTO)
    context.keep(SplitReport.__new__(SplitReport))
    assert fed(fx.Graph(), context) == {FeedRefusal.GRAPH_SPLIT: 1}
    assert (sites(context)[0].consumer, sites(context)[0].feed_refusal) == ("other", FeedRefusal.GRAPH_SPLIT)
    context = context_of(AUTO)
    with inductor_config.patch(max_autotune_gemm=True):
        assert fed(fx.Graph(), context) == {FeedRefusal.GEMMS_TUNED: 1}
    assert "max_autotune" in sites(context)[0].feed_detail and not sites(context)[0].detail


def test_the_report_says_what_is_fed(short: None) -> None:
    graph = graph_of()
    context = Context(AUTO, current_gate(AUTO))
    count = len(find_calls(graph))  # type: ignore[arg-type]
    context.keep(FusionDecisions(tuple(Site(index, 0, "form", "fused", "", None, "gloo") for index in range(count))))
    outcome = FEED.run(graph, context)
    assert outcome.changed and outcome.counts["fed"] == 4
    assert [site.consumer for site in sites(context)].count("fed") == 4
    assert all((site.consumer == "fed") == (not site.feed_refusal) for site in sites(context))


def rewritten(tokens: int, config: Config | None = None, model: str = "llama-3.1-8b", **options: Any) -> Rewritten:
    """What the passes make of two layers of ``model`` on two Hopper GPUs, for a prefill of ``tokens`` tokens."""
    with fake_cuda():
        decoder = build_decoder(load_config(model), device="cuda", dtype=BF16, num_layers=2)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        return rewrite(decoder, (ids,), config=config or Config(strict=True), **options)


def fed_tokens(found: Rewritten) -> list[int]:
    """From which number of tokens on each call is fed."""
    calls = find_calls(found.after.graph)
    assert isinstance(calls, list)
    return [argument(call.start, "feed_from") for call in calls]


def test_long_prefills_are_fed_by_default() -> None:
    found = rewritten(4096)
    assert found.report.fed == {"fed": 4, FeedRefusal.RESIDUAL_ON_ALL_RANKS: 1}
    assert len(find_ops(found.after.graph, "fed_gated_mm")) == len(find_ops(found.after.graph, "fed_joint_mm")) == 2
    assert fed_tokens(found) == [4096, 4096, 4096, 4096, 0]


def test_shorter_prefills_feed_the_gemms_that_have_own_tiles_enough() -> None:
    found = rewritten(1024, model="llama-3.3-70b")
    assert found.report.fed == {"fed": 2, FeedRefusal.MESSAGE_TOO_SMALL: 2, FeedRefusal.RESIDUAL_ON_ALL_RANKS: 1}
    assert not find_ops(found.after.graph, "fed_joint_mm") and fed_tokens(found) == [0, 1024, 0, 1024, 0]
    details = {site.feed_detail for site in found.report.sites if site.feed_refusal == FeedRefusal.MESSAGE_TOO_SMALL}
    assert details == {"1024 < 2048 tokens, which these GEMMs need to be busy while rows arrive"}


def test_short_prefills_are_not_fed_and_no_site_says_more_than_the_name() -> None:
    found = rewritten(2048)
    assert found.report.counts["fused"] == 5 and found.report.fed == {FeedRefusal.MESSAGE_TOO_SMALL: 5}
    assert not find_ops(found.after.graph, "fed_gated_mm") and not find_ops(found.after.graph, "fed_joint_mm")
    assert {site.feed_detail for site in found.report.sites} == {"2048 < 4096 tokens"}
    unasked = rewritten(2048, Config(strict=True, feed_mm="never")).report
    assert [site.detail for site in found.report.sites] == [site.detail for site in unasked.sites]
    assert not unasked.fed


@given(
    st.sampled_from([1024, 2880, 4096, 8192]),
    st.lists(st.integers(8, 40000), min_size=1, max_size=3),
    st.integers(2, 8),
)
def test_gemms_are_fed_from_a_wave_of_own_tiles_and_rows_enough_on(
    hidden: int, columns: list[int], world_size: int
) -> None:
    def suits(tokens: int) -> tuple[bool, bool]:
        fewest = min(own_pairs(tokens, *row_range(tokens, world_size, rank))[1] for rank in range(world_size))
        own = fewest * -(-sum(-(-one // BOX) * BOX for one in columns) // WIDTHS[0])
        return tokens * (world_size - 1) >= -(-(2**35) // hidden**2) * world_size, own >= 66

    send, fill = feeding.tokens_to_send(hidden, world_size), feeding.tokens_to_fill(columns, world_size)
    assert suits(send)[0] and not suits(send - 1)[0]
    assert suits(fill)[1] and not suits(fill - world_size)[1]


def test_always_feeds_few_tokens_and_many_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FED_UP_TO_RANKS", 1)
    assert rewritten(64, Config(strict=True, feed_mm="auto")).report.fed == {FeedRefusal.GROUP_TOO_LARGE: 5}
    found = rewritten(64, Config(strict=True, feed_mm="always"))
    assert found.report.fed == {"fed": 4, FeedRefusal.RESIDUAL_ON_ALL_RANKS: 1} and fed_tokens(found) == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_only_hopper_is_fed(capability: tuple[int, int]) -> None:
    config = Config(strict=True, transport="p2p")
    gate = current_gate(config)
    other = replace(gate, node=replace(gate.node, capability=capability))
    assert rewritten(4096, config, gate=other).report.fed == {FeedRefusal.DEVICE_NOT_SUPPORTED: 5}


def test_a_graph_for_few_tokens_too_is_fed_where_our_kernel_computes_its_gemms_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unmeasured = rewritten(4096, Config(strict=True, transport="p2p"), dynamic=True)
    assert unmeasured.report.fed == {FeedRefusal.MESSAGE_TOO_SMALL: 4, FeedRefusal.RESIDUAL_ON_ALL_RANKS: 1}
    assert not find_ops(unmeasured.after.graph, "fed_gated_mm")
    monkeypatch.setattr(feed, "measured_turns", lambda gemms, rows, device: (64,))
    assert rewritten(4096, Config(strict=True, transport="p2p"), dynamic=True).report.fed["fed"] == 4


def test_a_range_of_tokens_that_ends_earlier_is_not_fed(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tokens in {"tokens_to_send": 64, "tokens_to_fill": 4096}.items():
        monkeypatch.setattr(feeding, name, lambda *_, tokens=tokens: tokens)
    found = feed_gemms(graph_of(dynamic=True), (1, 4095), lambda gemms, rows, device: (64,)).values()
    refused = [feed._refused(one) for one in found]
    assert {one and one.reason for one in refused} == {FeedRefusal.MESSAGE_TOO_SMALL, FeedRefusal.RESIDUAL_ON_ALL_RANKS}


def test_ranks_feed_what_the_first_of_them_feeds(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose own matrices don't suit runs the same form of the call, and one whose do leaves them where others can't."""
    asked: list[tuple[str, dict[int, int]]] = []

    def first_feeds(sites: dict[int, int]) -> None:
        monkeypatch.setattr(feed, "agreed", lambda key, own: asked.append((key, own())) or sites)

    def form(graph: fx.Graph) -> tuple[dict[int, int], int]:
        calls = find_calls(graph)
        assert isinstance(calls, list)
        from_tokens = [argument(call.start, "feed_from") for call in calls]
        return {site: tokens for site, tokens in enumerate(from_tokens) if tokens}, len(find_ops(graph, "fed_gated_mm"))

    first_feeds({0: 5, 1: 6, 2: 5})
    suits, doesnt = graph_of(), graph_of(intermediate_size=132)
    assert reasons(suits)[:4] == ["fed", "fed", "fed", FeedRefusal.GEMM_NOT_OURS]
    found = feed_gemms(doesnt, None)
    assert form(suits) == ({0: 5, 1: 6, 2: 5}, 1) and form(doesnt) == ({0: 5, 1: 6, 2: 5}, 0), (
        "the same form of each call"
    )
    assert [site for site, one in found.items() if isinstance(one, feed.NotHere) and one.follows] == [1]
    (key, own), *_, (other_key, other) = asked
    assert key == other_key and set(other) < set(own)


def test_a_rank_with_too_few_own_tiles_runs_the_form_of_the_first_rank(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns say so, and another rank's may not."""
    monkeypatch.setattr(feeding, "tokens_to_fill", lambda *_: 4096)
    monkeypatch.setattr(feed, "agreed", lambda key, own: {0: 64})
    graph = graph_of()
    found = feed_gemms(graph, None)
    assert isinstance(found[0], feed.NotHere) and found[0].follows == 64
    assert found[0].refused.reason == FeedRefusal.MESSAGE_TOO_SMALL
    calls = find_calls(graph)
    assert isinstance(calls, list) and argument(calls[0].start, "feed_from") == 64


def test_a_matrix_of_symbolic_size_is_refused_by_name(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "gemms_of", lambda gemms: None)
    refused = [feed._refused(one) for one in feed_gemms(graph_of(), None).values()]
    assert "a matrix has a symbolic size" in [one.detail for one in refused if one]


def test_ranks_agree_on_what_is_always_fed_apart_from_what_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both may compile graphs of one shape in one process, as benchmarks do."""
    keys: list[str] = []
    monkeypatch.setattr(feed, "agreed", lambda key, own: keys.append(key) or own())
    fed_from(monkeypatch, 4)
    for always in (False, True):
        feed_gemms(graph_of(), None, always=always)
    assert len(keys) == len({*keys}) == 2


def test_calls_of_few_tokens_prefetch_the_weights_of_fed_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for few and many tokens has fed GEMMs. Its short calls prefetch what they prefetch where nothing is fed."""
    monkeypatch.setattr(feed, "measured_turns", lambda gemms, rows, device: (64,))

    def prefetched(feed_mm: str, fed: int) -> list[str]:
        config = Config(strict=True, transport="p2p", prefetch=str(2**23), feed_mm=feed_mm)
        graph = rewritten(4096, config, dynamic=True).after.graph
        assert len(find_ops(graph, "fed_gated_mm")) == fed
        calls = find_calls(graph)
        assert isinstance(calls, list)
        return [str(argument(call.start, "prefetch")) for call in calls]

    assert prefetched("auto", 2) == prefetched("never", 0) != ["None"] * 5


# --- the operators ---------------------------------------------------------------------------------------------------


def matrices(count: int) -> list[torch.Tensor]:
    return [torch.randn(24, 64).to(BF16).t() for _ in range(count)]


def in_flight(hidden: torch.Tensor) -> None:
    """A call that adds 1 to its result when it is waited for."""

    def finish() -> None:
        hidden.add_(1)

    ops.in_flight["0", 0] = Started(hidden, hidden.new_empty(0), finish)


def test_a_fed_gemm_completes_the_call_and_the_wait_has_nothing_to_do() -> None:
    hidden, factors = torch.randn(5, 64).to(BF16), matrices(2)
    want = hidden + 1
    in_flight(hidden)
    found = fed_joint_mm(hidden, factors, [], [0], "0", 0)
    assert all(torch.equal(one, want @ factor) for one, factor in zip(found, factors, strict=True))
    gated = fed_gated_mm(hidden, *factors, [0], "0", 0)
    assert torch.equal(gated, torch.nn.functional.silu(want @ factors[0]) * (want @ factors[1]))
    ops.wait_(hidden, hidden.new_empty(0), [], "0", 0)
    assert torch.equal(hidden, want) and not ops.in_flight and not ops.completed_early


def test_a_call_that_the_next_start_has_completed_is_complete() -> None:
    hidden, (factor,) = torch.randn(5, 64).to(BF16), matrices(1)
    in_flight(hidden)
    ops.complete_earlier("0", 0)
    (found,) = fed_joint_mm(hidden, [factor], [], [], "0", 0)
    assert torch.equal(found, hidden @ factor)


def test_a_fed_gemm_without_a_call_is_an_error() -> None:
    hidden, (factor,) = torch.randn(5, 64).to(BF16), matrices(1)
    in_flight(torch.randn(5, 64))
    with pytest.raises(RuntimeError, match="no call with this result is in flight on group '0', slot 0"):
        fed_joint_mm(hidden, [factor], [], [], "0", 0)


@pytest.mark.parametrize("operator", [fed_joint_mm, fed_gated_mm])
def test_opcheck(monkeypatch: pytest.MonkeyPatch, operator: Any) -> None:
    """It runs the operator on copies of its arguments: whatever is read is in flight, and complete."""
    monkeypatch.setattr(ops, "is_in_flight", lambda *_: True)
    monkeypatch.setattr(ops, "is_complete", lambda *_: True)
    hidden, factors = torch.randn(5, 64).to(BF16), matrices(2)
    args = (hidden, factors, [], [0], "0", 0) if operator is fed_joint_mm else (hidden, *factors, [0], "0", 0)
    torch.library.opcheck(operator, args)


# --- generated code --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_generated_code_runs_fed_gemms_before_the_wait() -> None:
    """Inductor orders them by what is written: the wait writes what the GEMM reads."""
    with fake_cuda():
        decoder = build_decoder(load_config("llama-3.1-8b"), device="cuda", dtype=BF16, num_layers=2)
        ids = torch.zeros(1, 4096, dtype=torch.long, device="cuda")
        config = Config(strict=True, split="off")
        code = compat.inductor_code(decoder, (ids,), TWCompilePass(config), "cuda", None, {})
    lines = [line for line in code.splitlines() if not line.strip().startswith("#")]

    def calls(name: str) -> list[int]:
        return [index for index, line in enumerate(lines) if f"{name}.default.direct(" in line]

    fed, waits, starts = calls("fed_gated_mm"), calls("all_reduce_rms_norm_wait_"), calls("all_reduce_rms_norm_start")
    assert len(fed) == 2
    for index in fed:
        wait = min(one for one in waits if one > index)
        start = max(one for one in starts if one < index)
        between = [line for line in lines[start + 1 : wait] if ".direct(" in line or ".run(" in line]
        assert between == [lines[index]], "nothing copies what the GEMM reads"
