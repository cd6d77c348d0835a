"""Weights of the next matmul, handed to fused calls of few tokens: which, when, and what Inductor makes of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn

from tw_compile import Config
from tw_compile.config import OPTION_PREFIX
from tw_compile.current import own_prefetch_bytes
from tw_compile.graph.predicates import is_call
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.prefetch import MOST_TENSORS
from tw_compile.passes.prefetch import prefetch_weights
from tw_compile.planning import load_profile
from tw_compile.planning.device import parse_profile
from tw_compile.planning.tables import toml_of
from tw_compile.report import PassReport
from tw_compile.testing import Rewritten, generated_code, rewrite

BF16 = torch.bfloat16
H = 64
BUDGET = 1 << 20
ASKED = Config(strict=True, prefetch=str(BUDGET), split="off")
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Block(nn.Module):
    """A sum, its norm, and what reads it: ``columns`` of each linear layer."""

    def __init__(self, columns: tuple[int, ...] = (H, 2 * H)) -> None:
        super().__init__()
        self.down = nn.Linear(H, H, bias=False)
        self.norm = nn.RMSNorm(H)
        self.next = nn.ModuleList(nn.Linear(H, count, bias=False) for count in columns)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        partial = self.down(x)
        dist.all_reduce(partial)
        residual = residual + partial
        return self.behind(self.norm(residual)), residual

    def behind(self, hidden: torch.Tensor) -> Any:
        return [one(hidden) for one in self.next]


def done(module: nn.Module, tokens: int = 5, config: Config = ASKED, **options: Any) -> Rewritten:
    x = torch.empty(tokens, H, dtype=BF16)
    return rewrite(module.to(BF16), (x, x), config=config, **options)


def starts(result: Rewritten) -> list[fx.Node]:
    return [node for node in result.after.graph.nodes if is_call(node, *ops.STARTS, *ops.MM_STARTS)]


def asked(start: fx.Node) -> list[list[int]]:
    """The shapes of what a call is given to prefetch."""
    weights: Any = start.kwargs.get("prefetch", [])
    assert all(weight.op == "placeholder" for weight in weights)
    return [list(weight.meta["val"].shape) for weight in weights]


def report(result: Rewritten) -> PassReport:
    (found,) = (each for each in result.report.passes if each.name == "prefetch_weights")
    return found


def test_a_call_is_given_the_weights_of_the_matmuls_behind_it_in_their_order() -> None:
    result = done(Block())
    (start,) = starts(result)
    assert asked(start) == [[H, H], [2 * H, H]] and start.kwargs["prefetch_bytes"] == BUDGET
    assert report(result).outcome == "changed" and report(result).counts == {"prefetching": 1}
    assert all(weight < start for weight in start.kwargs["prefetch"])  # type: ignore[union-attr]
    (wait,) = (node for node in result.after.graph.nodes if node.target is ops.wait_)
    assert not set(start.kwargs["prefetch"]) & set(wait.args[2])  # type: ignore[arg-type]


@pytest.mark.parametrize(("budget", "count"), [(2 * H * H, 1), (2 * H * H + 1, 2)])
def test_no_more_weights_than_the_budget_has_room_for(budget: int, count: int) -> None:
    (start,) = starts(done(Block(), config=Config(strict=True, prefetch=str(budget), split="off")))
    assert len(asked(start)) == count


def test_no_more_weights_than_a_kernel_takes() -> None:
    (start,) = starts(done(Block((H,) * (MOST_TENSORS + 2))))
    assert len(asked(start)) == MOST_TENSORS


@pytest.mark.parametrize(("columns", "count"), [((H, H), 2), ((H, 2 * H), 1), ((2 * H, H), 0)])
def test_a_matmul_with_many_weights_and_what_is_behind_it_are_left(
    monkeypatch: pytest.MonkeyPatch, columns: tuple[int, ...], count: int
) -> None:
    monkeypatch.setattr("tw_compile.passes.prefetch.MOST_WEIGHT_BYTES", 2 * H * H)
    result = done(Block(columns))
    (start,) = starts(result)
    assert len(asked(start)) == count
    assert report(result).counts == {"prefetching" if count else "many_weights": 1}


class Behind(Block):
    """What ``how`` makes of the norm's result comes before the matmul."""

    def __init__(self, how: str) -> None:
        super().__init__((H,))
        self.how = how
        self.computed = nn.Parameter(torch.randn(H, H))

    def behind(self, hidden: torch.Tensor) -> Any:
        (linear,) = self.next
        if self.how == "view":
            return linear(hidden.view(1, -1, H))
        if self.how == "last row":
            return linear(hidden[-1:])
        if self.how == "chosen rows":
            return linear(hidden[torch.tensor([0, 2], device=hidden.device)])
        if self.how == "post-norm":
            return linear(hidden + 1.5)
        if self.how == "computed":
            return hidden @ (self.computed * 2)
        if self.how == "second layer":
            partial = torch.relu(linear(hidden))
            dist.all_reduce(partial)
            return self.norm(partial) @ self.computed
        assert self.how == "none"
        return hidden


@pytest.mark.parametrize("how", ["view", "last row", "chosen rows", "post-norm"])
def test_a_matmul_is_found_behind_what_keeps_rows(how: str) -> None:
    (start,) = starts(done(Behind(how)))
    assert asked(start) == [[H, H]]


@pytest.mark.parametrize("how", ["computed", "none"])
def test_a_call_before_no_weight_of_the_graphs_inputs_is_counted(how: str) -> None:
    result = done(Behind(how))
    assert [asked(start) for start in starts(result)] == [[]]
    assert report(result).outcome == "unchanged" and report(result).counts == {"no_weight": 1}


def test_a_call_asks_for_what_is_read_before_the_next_sum() -> None:
    first, second = starts(done(Behind("second layer")))
    assert asked(first) == [[H, H]] and asked(second) == [[H, H]]
    assert first.kwargs["prefetch"] != second.kwargs["prefetch"]


def test_scaled_matmuls_and_ours_are_known() -> None:
    from tw_compile.kernels.gemm.by_rows import gated_mm_by_rows, joint_mm_by_rows

    graph, before = fx.Graph(), done(Block((H,)), config=Config(strict=True, split="off"))
    graph.output(graph.graph_copy(before.after.graph, {}))
    (matmul,) = (node for node in graph.nodes if is_call(node, torch.ops.aten.mm.default) and "mm" in node.name)
    rows, matrix = matmul.args
    scale = graph.find_nodes(op="placeholder")[0]
    for target, args in (
        (joint_mm_by_rows, (rows, [matrix, matrix], [], [0])),
        (gated_mm_by_rows, (rows, matrix, matrix, [0])),
        (torch.ops.aten._scaled_mm.default, (rows, matrix, scale, scale)),
    ):
        matmul.target, matmul.args = target, args
        assert prefetch_weights(graph, BUDGET, None) == {"prefetching": 1}
        (start,) = (node for node in graph.nodes if is_call(node, *ops.STARTS, *ops.MM_STARTS))
        assert asked(start) == [[H, H]]
        start.kwargs = {}


# --- how many tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "prefetching"), [(64, True), (65, False)])
def test_calls_of_many_tokens_are_left(tokens: int, prefetching: bool) -> None:
    result = done(Block(), tokens)
    assert [bool(asked(start)) for start in starts(result)] == [prefetching]
    assert report(result).counts == ({"prefetching": 1} if prefetching else {"many_tokens": 1})


def test_a_graph_for_any_number_of_tokens_leaves_it_to_the_call() -> None:
    result = done(Block(), dynamic=True)
    (start,) = starts(result)
    assert asked(start) and not isinstance(start.meta["val"][0].shape[0], int)
    graph = result.after.graph
    for tokens, expected in (((1, None), "prefetching"), ((65, 512), "many_tokens")):
        start.kwargs = {}
        assert prefetch_weights(graph, BUDGET, tokens) == {expected: 1}


# --- where nothing is asked for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "outcome", "why"),
    [
        ({"prefetch": "off"}, "refused", "prefetch is off"),
        ({"prefetch": "auto"}, "refused", "nobody has measured"),
        ({"prefetch": "auto", "device_profile": "H200"}, "refused", "nobody has measured"),
        ({"prefetch": "1000", "disable_passes": "prefetch_weights"}, "off", "disable_passes"),
        ({"prefetch": "1000", "transport": "nccl"}, "unchanged", ""),
    ],
)
def test_nothing_is_prefetched_where_nobody_wants_it_or_no_kernel_does(
    options: dict[str, Any], outcome: str, why: str
) -> None:
    result = done(Block(), config=Config(strict=True, split="off", **options))
    found = report(result)
    assert [start.kwargs.get("prefetch_bytes") for start in starts(result)] == [None]
    assert found.outcome == outcome and why in found.detail
    assert found.counts == ({"transport": 1} if outcome == "unchanged" else {})


def test_a_split_graph_is_left() -> None:
    result = done(Block(), 64, Config(strict=True, split="32", prefetch="1000"))
    assert report(result).outcome == "refused" and "split" in report(result).detail


# --- the option and the profile --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["on", "0", "-1", "1e6", "", "12345678901", True, 0, None, 1.5])
def test_what_is_no_number_of_bytes_is_refused(given: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=f"{OPTION_PREFIX}prefetch: expected off, auto or a number of bytes"
    ):
        Config(prefetch=given)


def test_a_number_of_bytes_has_one_spelling() -> None:
    asked: Any = 4096
    assert Config(prefetch=asked) == Config(prefetch="4096") and Config(prefetch="4096").prefetch_bytes == 4096
    assert Config().prefetch_bytes == Config(prefetch="off").prefetch_bytes == 0


def test_auto_goes_by_the_profile(tmp_path: Any) -> None:
    assert own_prefetch_bytes(Config(device_profile="H100")) == load_profile("H100").prefetch_bytes == 4 << 20
    shipped = load_profile("H200")
    assert shipped.prefetch_bytes is None and "prefetch_bytes" not in toml_of(shipped)
    assert own_prefetch_bytes(Config(device_profile="H200")) == own_prefetch_bytes(Config()) == 0
    file = tmp_path / "mine.toml"
    file.write_text("prefetch_bytes = 8388608\n" + toml_of(shipped))
    assert toml_of(load_profile(str(file))).count("prefetch_bytes = 8388608") == 1
    assert own_prefetch_bytes(Config(device_profile=str(file))) == 8 << 20
    assert own_prefetch_bytes(Config(device_profile=str(file), split="off")) == 8 << 20
    assert own_prefetch_bytes(Config(device_profile=str(file), prefetch="off")) == 0
    assert own_prefetch_bytes(Config(device_profile=str(file), prefetch="100")) == 100
    with pytest.raises(ValueError, match="prefetch_bytes: expected a positive int, got 0"):
        parse_profile("prefetch_bytes = 0\n" + toml_of(shipped), "mine")


# --- what Inductor makes of it ---------------------------------------------------------------------------------------


@pytest.mark.full
def test_generated_code_hands_over_the_weights_as_they_are_and_keeps_them_for_the_matmul() -> None:
    x = torch.empty(5, H, dtype=BF16)
    # From 2.12 on an input's size is checked in front of its first reader, which is another call with prefetch than without.
    options = {} if TORCH_VERSION < (2, 12) else {"size_asserts": False}
    with_it, without = (
        generated_code(Block().bfloat16(), (x, x), device="cuda", config=config, options=options)
        for config in (ASKED, Config(strict=True, split="off"))
    )
    (line,) = (line for line in with_it.splitlines() if "all_reduce_rms_norm_start.default.direct(" in line)
    found = re.search(rf"prefetch=\[(\w+), (\w+)\], prefetch_bytes={BUDGET}\)", line)
    assert found, line
    lines = with_it.splitlines()
    begin = lines.index(line)
    for weight in found.groups():
        assert weight.startswith("arg"), "an input itself, no copy of it"
        (reads,) = (at for at, text in enumerate(lines) if "extern_kernels.mm(" in text and f"({weight}," in text)
        freed = next(at for at, text in enumerate(lines) if re.search(rf"\bdel {weight}\b", text))
        assert begin < reads < freed
    # Nothing else is different: no kernel more, and nothing is freed elsewhere.
    names = re.compile(r"# AOT ID: .*")
    assert names.sub("", with_it.replace(f", {found[0][:-1]}", "")) == names.sub("", without)


def test_a_wrong_profile_is_refused_by_the_options_name_where_nothing_is_split() -> None:
    with pytest.raises(ValueError, match=r"tw_compile\.device_profile"):
        own_prefetch_bytes(Config(split="off", device_profile="nope"))
