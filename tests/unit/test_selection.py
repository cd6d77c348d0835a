"""Which kernel serves which message: tables of measured choices."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tw_compile.benchmark.variants import OURS, by_wires
from tw_compile.kernels.algorithms import ALGORITHMS, with_scales
from tw_compile.kernels.algorithms.push.sharing_push import SharingPush
from tw_compile.kernels.algorithms.stream.stream import Stream
from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.spec import NormSpec, Request
from tw_compile.kernels.transports import selection
from tw_compile.kernels.transports.selection import Insist, Selector, Step, steps_for, steps_of, table_text

STEPS = (Step(4, 100, "push_one_shot", 8), Step(4, 1000, "push_two_shot", 16), Step(4, 10_000, "stream", 4))
STATE: Any = SimpleNamespace(world_size=4, rank=1)


def message(nbytes: int, overlap_sms: int = 0) -> Any:
    norm = SimpleNamespace(scale_columns=0)
    x = SimpleNamespace(nbytes=nbytes)
    return SimpleNamespace(x=x, norm=norm, residual_out="sharded", overlap_sms=overlap_sms, wire="exact", feed_from=0)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[type[Algorithm]]:
    """Kinds that serve nothing."""
    kinds: set[type[Algorithm]] = set()
    for kind in (SharingPush, Stream):
        monkeypatch.setattr(kind, "obstacle", lambda self, request, state: "no" if type(self) in kinds else None)
    return kinds


@pytest.mark.parametrize(
    ("nbytes", "kind", "sms"),
    [
        (1, SharingPush, 8),
        (100, SharingPush, 8),
        (101, SharingPush, 16),
        (1000, SharingPush, 16),
        (1001, Stream, 4),
        (10**9, Stream, 4),
    ],
)
def test_steps_go_by_bytes_and_the_last_serves_the_rest(
    refused: set[type[Algorithm]], nbytes: int, kind: type[Algorithm], sms: int
) -> None:
    chosen = Selector(STEPS).choose(message(nbytes), STATE)
    assert type(chosen) is kind and chosen.sms(10**6, 4) == sms


@pytest.mark.parametrize(
    ("serving_nothing", "kinds"),
    [
        (set(), [SharingPush, SharingPush, SharingPush, Stream]),  # one-shot's second choice is the two-shot push
        ({SharingPush}, [SharingPush, SharingPush, TwoShot, SharingPush, Stream]),
        ({Stream}, [SharingPush, SharingPush, SharingPush, Stream, TwoShot]),
    ],
)
def test_alternatives_are_all_that_a_table_may_choose(
    refused: set[type[Algorithm]], serving_nothing: set[type[Algorithm]], kinds: list[type[Algorithm]]
) -> None:
    refused |= serving_nothing
    assert [type(algorithm) for algorithm in Selector(STEPS).alternatives(message(1), STATE)] == kinds


def test_without_a_table_there_are_no_alternatives() -> None:
    assert Selector().alternatives(message(1), STATE) == Insist(Stream()).alternatives(message(1), STATE) == ()


def test_what_an_algorithm_cannot_serve_is_done_two_shot(refused: set[type[Algorithm]]) -> None:
    refused |= {SharingPush, Stream}
    for nbytes in (1, 500, 5000):
        assert isinstance(Selector(STEPS).choose(message(nbytes), STATE), TwoShot)
    assert isinstance(Insist(Stream()).choose(message(1), STATE), TwoShot)


@pytest.mark.parametrize("steps", [(), STEPS])
def test_beside_other_work_the_first_that_can_serves_all_sizes(
    refused: set[type[Algorithm]], steps: tuple[Step, ...]
) -> None:
    selector = Selector(steps)
    for kind in (Stream, SharingPush, TwoShot):
        chosen = {selector.choose(message(nbytes, overlap_sms=8), STATE) for nbytes in (1, 500, 10**9)}
        assert [type(one) for one in chosen] == [kind], "more than one kernel to load before capture"
        assert all(one.sms(10**6, 4) == 32 for one in chosen), "a limit of its own below that of the request"
        refused.add(kind)


def test_small_messages_without_the_whole_residual_are_pushed_two_shot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SharingPush, "obstacle", lambda self, request, state: "no" if self.name == "push_one_shot" else None
    )
    chosen = Selector(STEPS).choose(message(1), STATE)
    assert isinstance(chosen, SharingPush) and chosen.name == "push_two_shot" and chosen.sms(10**6, 4) == 8


def test_unmeasured_devices_take_the_two_shot_kernel() -> None:
    for world_size in (2, 4, 8):
        assert isinstance(Selector(steps_for("A GPU of tomorrow", world_size)).choose(message(1), STATE), TwoShot)


def test_shipped_tables_are_valid() -> None:
    for device, steps in selection.shipped_tables().items():
        assert device and steps


def test_a_table_serves_its_own_device_and_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "shipped_tables", lambda: {"GPU": STEPS})
    monkeypatch.setattr(Stream, "obstacle", lambda self, request, state: None)
    assert isinstance(Selector(steps_for("GPU", 4)).choose(message(5000), STATE), Stream)
    assert isinstance(Selector(steps_for("GPU", 2)).choose(message(5000), STATE), TwoShot)
    assert isinstance(Selector(steps_for("GPU 2", 4)).choose(message(5000), STATE), TwoShot)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(2, 8), st.integers(1, 2**40), st.sampled_from(ALGORITHMS.names()), st.integers(1, 16)),
        max_size=8,
        unique_by=lambda entry: entry[:2],
    )
)
def test_a_table_reads_back_as_it_was_written(entries: list[tuple[int, int, str, int]]) -> None:
    steps = tuple(Step(*entry) for entry in sorted(entries))
    assert steps_of(table_text("NVIDIA H200", steps, "measured\non one machine"), "t") == ("NVIDIA H200", steps)


GOOD = table_text("GPU", STEPS, "")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('device = "GPU"', "device = 3", "t: device: expected str, got 3"),
        ('device = "GPU"', 'devices = "GPU"', "t: expected the keys device and steps, got 'devices'"),
        (
            "up_to_bytes = 1000\n",
            "up_to_bytes = 50\n",
            "go up in world_size and then up_to_bytes, got (4, 50) after (4, 100)",
        ),
        ("up_to_bytes = 100\n", "up_to_bytes = 0\n", "t: steps[0]: up_to_bytes: expected a positive number, got 0"),
        ("up_to_bytes = 100\n", "up_to_bytes = true\n", "t: steps[0]: up_to_bytes: expected int, got True"),
        ('"stream"', '"beam"', "t: steps[2]: algorithm: expected one of"),
        ("sms = 4\n", "sms = 400\n", "t: steps[2]: sms: max_sms: expected 1 to 32, got 400"),
        (
            "sms = 4\n",
            "cta = 4\n",
            "t: steps[2]: expected the keys world_size, up_to_bytes, algorithm, sms, got 'cta'",
        ),
    ],
)
def test_a_bad_table_is_refused_with_the_key(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ValueError) as error:
        steps_of(GOOD.replace(old, new), "t")
    assert message in str(error.value)


def test_equal_bytes_give_equal_choices_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    selector = Selector(STEPS)
    x = SimpleNamespace(nbytes=50, shape=(1, 64), dtype=torch.bfloat16, device="cuda:0")
    norm = SimpleNamespace(epilogue="rms_norm", hidden_dtype=torch.bfloat16, scale_columns=0)
    request: Any = SimpleNamespace(
        x=x,
        residual=None,
        bias=None,
        weight=None,
        norm_bias=None,
        norm=norm,
        residual_sharded=False,
        residual_out="none",
        overlap_sms=0,
        wire="exact",
        feed_from=0,
    )
    chosen = {id(selector.choose(request, SimpleNamespace(world_size=4, rank=rank))) for rank in range(4)}
    assert len(chosen) == 1


def coded(wire: str, overlap_sms: int = 0, tokens: int = 1) -> Request:
    x = torch.empty(tokens, 256, dtype=torch.bfloat16, device="meta")
    norm = NormSpec(1e-5, 0.0, None, torch.bfloat16, torch.bfloat16)
    return Request(x, None, None, None, norm, False, "none", "", 0, overlap_sms=overlap_sms, wire=wire)


@pytest.mark.parametrize(("world_size", "sms"), [(2, 24), (3, 16), (4, 16), (8, 16)])
def test_rows_in_codes_have_more_sms_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, world_size: int, sms: int
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    state: Any = SimpleNamespace(world_size=world_size, rank=0)
    selector = Selector(selection.default_steps("host", world_size), "host")
    for overlap_sms in (0, 8):
        chosen = selector.choose(coded("int8", overlap_sms, tokens=1024), state)
        assert (chosen.name, chosen.sms(10**6, world_size)) == ("host_two_shot", sms)
    ours = [variant for variant in OURS if variant.label == "tw-host-two-shot"]
    assert [variant.sms for variant in by_wires(ours, ("exact", "int8"), world_size)] == [8, sms]


@pytest.mark.parametrize("overlap_sms", [0, 8])
@pytest.mark.parametrize(("transport", "name"), [("p2p", "push_two_shot"), ("host", "host_two_shot")])
def test_a_wire_goes_to_the_kernel_that_has_it(
    monkeypatch: pytest.MonkeyPatch, transport: str, name: str, overlap_sms: int
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    steps = STEPS if transport == "p2p" else selection.default_steps("host", 2)
    for chooser in (Selector(steps, transport), Insist(TwoShot(), transport)):
        for tokens in (1, 3, 40, 4000):
            request = coded("int8", overlap_sms, tokens)
            assert chooser.settled(request, STATE) is request
            assert chooser.choose(request, STATE).name == name
            assert chooser.choose(replace(request, wire="exact"), STATE) is not chooser.choose(request, STATE)


def test_without_a_kernel_for_it_rows_travel_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 0))
    for chooser in (Selector(STEPS), Insist(SharingPush(False))):
        settled = chooser.settled(coded("int6"), STATE)
        assert settled == replace(coded("int6"), x=settled.x, wire="exact")
        assert isinstance(chooser.choose(settled, STATE), TwoShot)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_before_hopper_push_serves_alone_beside_other_work_and_in_codes(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    for world_size in (2, 4, 8):
        selector = Selector(selection.default_steps("p2p", world_size))
        state: Any = SimpleNamespace(world_size=world_size, rank=0)
        for asked, name in (
            (coded("exact"), "push_one_shot"),
            (coded("exact", tokens=40_000), "push_two_shot"),
            (coded("exact", 8, tokens=4000), "push_two_shot"),
            (coded("int8", tokens=4000), "push_two_shot"),
        ):
            assert selector.settled(asked, state) is asked and selector.choose(asked, state).name == name


@pytest.mark.parametrize("overlap_sms", [0, 4])
@pytest.mark.parametrize("tokens", [1, 10_000])
def test_scales_are_made_by_a_kernel_that_can(monkeypatch: pytest.MonkeyPatch, tokens: int, overlap_sms: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    norm = NormSpec(1e-5, 0.0, None, torch.float8_e4m3fn, torch.bfloat16, scale_columns=128)
    x = torch.empty(tokens, 256, dtype=torch.bfloat16)
    request = Request(x, None, None, None, norm, False, "none", "", 0, overlap_sms=overlap_sms)
    for chooser in (Selector(), Selector(STEPS), Insist(TwoShot())):
        chosen = chooser.choose(chooser.settled(request, STATE), STATE)
        assert ALGORITHMS[chosen.name].scales and chosen.obstacle(request, STATE) is None
        given = replace(request, norm=replace(norm, hidden_dtype=torch.bfloat16, scale_columns=0))
        assert chooser.choose(given, STATE).obstacle(given, STATE) is None
    assert any(ALGORITHMS[one.name].scales for one in Selector(STEPS).alternatives(request, STATE))


@pytest.mark.parametrize(("scales", "wanted"), [(128, ["push_two_shot"]), (0, ["two_shot"])])
def test_beside_other_work_what_serves_instead_of_refused_kernels_is_loaded_too(
    monkeypatch: pytest.MonkeyPatch, refused: set[type[Algorithm]], scales: int, wanted: list[str]
) -> None:
    """All that is tried first may be refused, and of the rest not all make scales."""
    refused |= {Stream, SharingPush}
    norm = NormSpec(1e-5, 0.0, None, torch.bfloat16, torch.bfloat16, scale_columns=scales)
    x = torch.empty(8, 256, dtype=torch.bfloat16, device="meta")
    request = Request(x, None, None, None, norm, False, "none", "", 0, overlap_sms=8)
    monkeypatch.setattr(TwoShot, "obstacle", lambda self, request, state: "no scales" if scales else None)
    selector = Selector(STEPS)
    if scales:
        assert selector.alternatives(request, STATE) == ()
        refused.discard(SharingPush)
    assert [one.name for one in selector.alternatives(request, STATE)] == wanted


@pytest.mark.parametrize(("device", "world_size"), [("NVIDIA H200", 2), ("NVIDIA H100 80GB HBM3", 4)])
def test_devices_that_nobody_measured_get_what_was_fastest_elsewhere(device: str, world_size: int) -> None:
    measured = selection.shipped_steps(device, world_size)
    default = selection.default_steps("p2p", world_size)
    assert [(step.algorithm, step.sms) for step in default] == [(step.algorithm, step.sms) for step in measured]
    assert default[0].up_to_bytes == pytest.approx(measured[0].up_to_bytes, rel=1e-3)


def test_the_more_ranks_the_sooner_one_shot_ends() -> None:
    ends = [selection.default_steps("p2p", world_size)[0].up_to_bytes for world_size in range(2, 9)]
    assert ends == sorted(ends, reverse=True) and ends[-1] > 64 * 1024


@pytest.mark.parametrize("transport", ["p2p", "host"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tokens", [10_000, 100_000])
@pytest.mark.parametrize("residual_out", ["replicated", "sharded"])
def test_two_ranks_that_both_want_all_rows_of_the_residual_have_one_shot(
    monkeypatch: pytest.MonkeyPatch, transport: str, world_size: int, tokens: int, residual_out: str
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    selector = Selector(selection.default_steps(transport, world_size), transport)
    request = replace(coded("exact", tokens=tokens), residual_out=residual_out)
    state: Any = SimpleNamespace(world_size=world_size, rank=0)
    whole = world_size == 2 and residual_out == "replicated"
    short = world_size == 2 and transport == "host" and request.x.nbytes <= 2**23
    assert selector.choose(request, state).name.endswith("one_shot" if whole or short else "two_shot")
    assert selector.choose(request, state) in selector.alternatives(request, state)
    # Beside other work that holds through host memory alone, where one-shot has one hop less.
    beside = replace(request, overlap_sms=8)
    of_host = "host_one_shot" if whole or short else "host_two_shot"
    assert selector.choose(beside, state).name == ("stream" if transport == "p2p" else of_host)
    assert selector.choose(beside, state) in selector.alternatives(beside, state)
    # Without the whole residual it is two-shot as ever.
    shard = torch.empty(1, 256, dtype=torch.float32, device="meta")
    assert selector.choose(replace(request, residual=shard, residual_sharded=True), state).name.endswith("two_shot")


@pytest.mark.parametrize(("world_size", "times"), [(3, 1.0), (4, 2.0), (8, 1.2)])
def test_one_shot_serves_longer_messages_whose_whole_residual_all_ranks_want(
    monkeypatch: pytest.MonkeyPatch, world_size: int, times: float
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    steps = selection.default_steps("p2p", world_size)
    selector = Selector(steps)
    state: Any = SimpleNamespace(world_size=world_size, rank=0)
    row_bytes = coded("exact", tokens=1).x.nbytes
    for residual_out, end in (("sharded", steps[0].up_to_bytes), ("replicated", steps[0].up_to_bytes * times)):
        for tokens, expected in (
            (int(end) // row_bytes, "push_one_shot"),
            (int(end) // row_bytes + 1, "push_two_shot"),
        ):
            request = replace(coded("exact", tokens=tokens), residual_out=residual_out)
            assert selector.choose(request, state).name == expected


def test_steps_that_go_down_are_refused_also_with_another_transports_between() -> None:
    entry = '[[steps]]\nworld_size = 2\nup_to_bytes = {}\nalgorithm = "{}"\nsms = 8\n'
    steps = [(1000, "push_one_shot"), (500, "host_words"), (10, "push_two_shot")]
    text = 'device = "GPU"\n' + "".join(entry.format(*step) for step in steps)
    with pytest.raises(ValueError, match=r"steps: expected to go up .* got \(2, 10\) after \(2, 1000\)"):
        steps_of(text, "kernels.toml")


def test_forced_ways_are_not_tried_for_calls_that_make_scales() -> None:
    """Their kernels would be compiled and loaded for every such call."""
    assert [entry.name for entry in with_scales("p2p")] == ["push_two_shot", "stream"]
