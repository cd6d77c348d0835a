"""Links that are slower than peer memory: their data, and what plans make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tw_compile.benchmark.layer.parts import even_parts, main, parts_us
from tw_compile.cli.app import app
from tw_compile.planning import LayerShape, Mode, Off, evidence, load_profile, plan_layer
from tw_compile.planning.communication import beside_us, link_us, traffic_bytes
from tw_compile.planning.evidence import UNMEASURED_MARGIN, measured_layers
from tw_compile.planning.links import USER_FILE, Link, LinkTransport, LinkWay, link_of_node, parse_link, shipped_link
from tw_compile.planning.plan import UNEVEN_OVER_LINKS
from tw_compile.planning.windows import Costs, RowShares, Wires

H200 = load_profile("H200")
LINK = shipped_link()
TEXT = (resources.files("tw_compile.configs") / "links" / "host-memory.toml").read_text()
ROWS = list(measured_layers("NVIDIA H200", "nccl", LINK.name))
LAYER = ROWS[0].shape
H100 = load_profile("H100")
OVER_HOST = [
    pytest.param(profile, row, id=f"{profile.name}-{row.model}-{row.tokens}")
    for profile, name in ((H100, "NVIDIA H100 80GB HBM3"), (H200, "NVIDIA H200"))
    for row in measured_layers(name, "host", LINK.name)
]


def with_rate(link: Link, transport: str, way: LinkWay) -> Link:
    rates = replace(link.transports[transport], ways={"way": way})
    return replace(link, transports={**link.transports, transport: rates})


def test_every_number_has_its_source_beside_it() -> None:
    values = [line for line in TEXT.splitlines() if "=" in line.partition("#")[0] and ' = "' not in line]
    numbers = [line for line in values if "true" not in line and "false" not in line]
    assert len(numbers) == 15
    for line in numbers:
        assert line.partition("#")[2].strip().startswith(("measured", "fitted", "estimate")), line


@pytest.mark.parametrize(
    ("transport", "hidden", "times"),
    [
        ("nccl", 8192, {16: 36, 64: 63, 256: 168, 1024: 591, 4096: 2315}),
        ("host", 8192, {16: 18.1, 64: 48.5, 256: 127.4, 512: 230.7, 1024: 433.6, 4096: 1653, 16384: 6502}),
        (
            "host",
            4096,
            {1: 5.7, 16: 11.7, 64: 28.4, 128: 47.1, 256: 75.9, 512: 128.5, 1024: 231.8},
        ),
    ],
)
def test_figures_that_the_rates_were_fitted_to(transport: str, hidden: int, times: dict[int, float]) -> None:
    for tokens, us in times.items():
        assert link_us(LINK.transport(transport), 2 * tokens * hidden, 2) == pytest.approx(us, rel=0.06)


def test_traffic_of_one_shot_grows_with_the_ranks_and_that_of_two_shot_does_not_double() -> None:
    assert [traffic_bytes("one_shot", 1000, ranks) for ranks in (2, 4, 8)] == [1000, 3000, 7000]
    assert [traffic_bytes("two_shot", 1000, ranks) for ranks in (2, 4, 8)] == [1000, 1500, 1750]
    host = LINK.transport("host")
    all_read_all = replace(host, ways={name: way for name, way in host.ways.items() if way.traffic == "one_shot"})
    assert link_us(host, 2**14, 8) == link_us(all_read_all, 2**14, 8)
    assert link_us(host, 2**24, 8) < link_us(all_read_all, 2**24, 8)


def test_calls_beside_compute_have_no_words() -> None:
    host = LINK.transport("host")
    assert link_us(host, 2**19, 2) == link_us(with_ways(host, "words"), 2**19, 2)
    alone = link_us(host, 2**19, 2, beside=True)
    assert alone == link_us(with_ways(host, "one_shot"), 2**19, 2) > 1.15 * link_us(host, 2**19, 2)
    assert beside_us(H100, host, 64, 4096, 2, host.sms) == host.contention * alone


def test_a_file_of_before_that_does_not_say_which_calls_have_words_or_fewer_sms_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tw_compile").mkdir()
    later = ("beside = ", "fewer_sms = ", "sm_gb_per_s = ")
    lines = [line for line in TEXT.splitlines() if not line.startswith(later)]
    (tmp_path / "tw_compile" / USER_FILE).write_text("\n".join(lines).replace("gb_per_s = 22.5", "gb_per_s = 20"))
    host = link_of_node().transport("host")
    assert (host.ways["words"].gb_per_s, host.ways["words"].beside) == (20, False)
    assert host.ctas_beside == (4, 8) and host.ways["two_shot"] == LINK.transport("host").ways["two_shot"]
    other = "\n".join(lines).replace("sms = 8 ", "sms = 6 ")
    (tmp_path / "tw_compile" / USER_FILE).write_text(other)
    assert link_of_node().transport("host").ctas_beside == (6,)


def test_fewer_sms_take_the_ways_that_can_have_them_at_the_rate_of_these_sms() -> None:
    host = LINK.transport("host")
    assert host.ctas_beside == (4, 8)
    for nbytes, us in {2**24: 551, 2**26: 2195}.items():  # alone on 4 SMs
        assert link_us(host, nbytes, 2, beside=True, sms=4) == pytest.approx(us, rel=0.03)
    two_shot = with_ways(host, "two_shot")
    assert link_us(host, 2**20, 2, beside=True, sms=4) == link_us(two_shot, 2**20, 2, sms=4)
    assert link_us(host, 2**20, 2, beside=True, sms=8) == link_us(with_ways(host, "one_shot"), 2**20, 2)
    wide = with_rate(LINK, "host", LinkWay("two_shot", 27.0, 41.2, sm_gb_per_s=20.6)).transport("host")
    assert link_us(wide, 2**24, 2, sms=4) == link_us(wide, 2**24, 2)  # four SMs fill the link
    assert beside_us(H100, host, 1024, 8192, 2, 4) == host.contention * link_us(host, 2**24, 2, beside=True, sms=4)


def test_calls_have_fewer_sms_beside_long_compute_and_all_of_them_where_they_are_longer() -> None:
    large = next(param.values[1].shape for param in OVER_HOST if param.values[1].model == "llama-3.3-70b")
    for tokens in (1024, 2048, 4096):
        windows = plan_layer(H100, large, tokens, kernel="host", link=LINK).windows
        assert [(window.computes, window.ctas) for window in windows] == [
            ("attention", 8),
            ("attention", 8),
            ("mlp", 4),
            ("mlp", 4),
        ]
        assert all(window.communication_us < window.compute_us for window in windows[2:])
    small = plan_layer(H100, LAYER, 1024, kernel="host", link=LINK).windows
    assert {window.ctas for window in small} == {8}
    coded = Wires(RowShares(0.52, 0.52, "int8"), RowShares(0.52, 0.52, "int8"))
    windows = plan_layer(H100, large, 4096, kernel="host", link=LINK, wires=coded).windows
    assert {window.ctas for window in windows} == {8}, "rows in codes are work for SMs"


def test_halves_over_a_link_are_equal_unless_others_gain_more_than_they_were_seen_to_lose() -> None:
    for tokens in (1024, 2048, 4096, 8192):
        assert plan_layer(H100, LAYER, tokens, kernel="host", link=LINK).sizes == (tokens // 2, tokens // 2)
    plan = plan_layer(H100, LAYER, 2048, kernel="host", link=LINK, first=896)
    assert plan.predicted.split_us == pytest.approx(
        sum(window.us for window in plan.windows) * (1.0 + UNEVEN_OVER_LINKS * 0.125)
    )


def with_ways(transport: LinkTransport, *names: str) -> LinkTransport:
    return replace(transport, ways={name: transport.ways[name] for name in names})


def test_nccl_takes_the_link_only_without_peer_access_and_host_always() -> None:
    served = {name: (LINK.serves(name, True), LINK.serves(name, False)) for name in ("nccl", "host", "p2p", "mine")}
    assert served == {"nccl": (False, True), "host": (True, True), "p2p": (False, False), "mine": (False, False)}


def test_the_users_file_comes_before_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert link_of_node() == LINK
    (tmp_path / "tw_compile").mkdir()
    (tmp_path / "tw_compile" / USER_FILE).write_text(TEXT.replace("gb_per_s = 29 ", "gb_per_s = 12 "))
    assert link_of_node().transport("nccl").ways["ring"].gb_per_s == 12
    (tmp_path / "tw_compile" / USER_FILE).write_text("name = 3")
    with pytest.raises(ValueError, match=r"host-memory\.toml: expected the keys name, transports"):
        link_of_node()
    result = CliRunner().invoke(app, ["plan", "--transport", "nccl"])
    assert result.exit_code == 2 and "host-memory.toml" in result.output


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "gb_per_s = 29 ",
            "gb_per_s = 0 ",
            "t: transports.nccl: ways.ring: gb_per_s: expected a positive float, got 0",
        ),
        ('traffic = "one_shot"', 'traffic = "ring"', "traffic: expected one of one_shot, two_shot, got 'ring'"),
        ("norm_apart = true ", "norm_apart = 1 ", "t: transports.nccl: norm_apart: expected true or false, got 1"),
        ("[transports.nccl", "[transports.mine", "t: transports: expected nccl among them, got mine, host"),
        ("contention = 1.2 ", "contention = 0.9 ", "t: transports.nccl: contention: expected at least 1, got 0.9"),
        (
            "gb_per_s = 29 ",
            "beside = false\ngb_per_s = 29 ",
            "t: transports.nccl: ways: expected one of two_shot with beside = true",
        ),
        ("fewer_sms = [4] ", "fewer_sms = [8] ", "t: transports.host: fewer_sms: expected fewer than sms = 8, got 8"),
        ("sm_gb_per_s", "#", "t: transports.host: fewer_sms: expected one of ways with sm_gb_per_s, got none"),
        ('name = "host-memory"', "name =", "t: expected TOML, got"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_link(TEXT.replace(old, new), "t")
    assert message in str(refused.value)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.tokens))
def test_layers_over_host_memory_are_predicted_within_eight_percent_and_their_splits_within_three(row) -> None:  # type: ignore[no-untyped-def]
    plan = plan_layer(H200, row.shape, row.tokens, link=LINK)
    assert (plan.mode, plan.sizes[0]) == (Mode.SPLIT, row.first)
    assert plan.predicted.unfused_us == pytest.approx(row.unfused_us, rel=0.03)
    assert plan.predicted.split_us == pytest.approx(row.split_us, rel=0.03)
    assert plan.predicted.no_communication_us == pytest.approx(row.no_communication_us, rel=0.07)
    assert plan.rates.startswith("nccl over host-memory: ring 28 us and 29 GB/s each way")


@pytest.mark.parametrize(("profile", "row"), OVER_HOST)
def test_layers_through_host_memory_are_predicted_within_nine_percent(profile, row) -> None:  # type: ignore[no-untyped-def]
    assert plan_layer(profile, row.shape, row.tokens, kernel="host", link=LINK).mode is Mode.SPLIT
    plan = plan_layer(profile, row.shape, row.tokens, kernel="host", link=LINK, first=row.first)
    assert plan.predicted.unfused_us == pytest.approx(row.unfused_us, rel=0.04)
    assert plan.predicted.split_us == pytest.approx(row.split_us, rel=0.09)


def test_the_margin_follows_from_measured_layers_where_there_are_some() -> None:
    known = evidence(H200, "nccl", LINK)
    assert len(known.counted) == len(ROWS) == 2 and 0.0 < known.margin < 0.02
    assert plan_layer(H200, LAYER, 1024, link=LINK).margin == known.margin
    assert evidence(H200, None, LINK) == known
    # Of host's layers none was predicted too fast.
    assert {evidence(profile, "host", LINK).margin for profile in (H100, H200)} == {0.0}
    for profile, transport in ((H100, "nccl"), (load_profile("B200"), "nccl"), (load_profile("B200"), "host")):
        assert evidence(profile, transport, LINK).margin == UNMEASURED_MARGIN


def test_a_sum_over_host_brings_its_norm_along_and_one_over_nccl_does_not() -> None:
    nccl, host = (
        plan_layer(H200, LAYER, 4096, kernel=name, link=LINK, joins_gemms=False, min_gain=0.0)
        for name in ("nccl", "host")
    )
    assert nccl.predicted.fused_us == pytest.approx(nccl.predicted.unfused_us)
    assert nccl.predicted.no_communication_us == pytest.approx(host.predicted.no_communication_us)
    norms = 2 * Costs(H200, LAYER, LINK.transport("host"), (4096,), link=LINK).norm_us(4096)
    both = 2 * link_us(LINK.transport("host"), LAYER.message_bytes(4096), 2)
    assert host.predicted.fused_us == pytest.approx(host.predicted.no_communication_us - norms + both)


def test_few_tokens_are_left_whole_and_a_transport_without_rates_is_refused() -> None:
    assert plan_layer(H200, LAYER, 64, link=LINK).off is Off.NOT_FASTER
    with pytest.raises(ValueError, match=r"transport: expected one of nccl, host \(host-memory\), got 'p2p'"):
        plan_layer(H200, LAYER, 1024, kernel="p2p", link=LINK)


def test_windows_take_as_long_as_their_sums_where_the_link_is_slow() -> None:
    slow = with_rate(LINK, "nccl", LinkWay("two_shot", 28.0, 5.0))
    rates, plan = slow.transport("nccl"), plan_layer(H200, LAYER, 4096, link=slow)
    assert plan.mode is Mode.SPLIT and plan.us == pytest.approx(sum(window.us for window in plan.windows))
    for window in plan.windows:
        beside = window.compute_us * (1.0 - 1.0 / rates.contention)
        assert window.us == pytest.approx(link_us(rates, window.message_bytes, 2) + beside + H200.window_us)


def test_more_parts_save_nothing_where_communication_is_all_that_counts() -> None:
    costs = Costs(H200, LAYER, LINK.transport("nccl"), (4096,), link=LINK)
    times = [parts_us(costs, even_parts(4096, number)) for number in (2, 3, 4)]
    assert times == sorted(times)
    planned = plan_layer(H200, LAYER, 4096, first=2048, link=LINK).predicted.split_us
    assert times[0] == pytest.approx(planned, rel=0.02)
    assert parts_us(costs, (4096,)) > times[0]


def test_parts_of_one_layer_without_sums_take_what_it_computes() -> None:
    silent = replace(LAYER, attention_summed=False, mlp_summed=False)
    costs = Costs(H200, silent, LINK.transport("nccl"), (1024,), link=LINK)
    whole = costs.alone_us([*costs.attention_part(range(1024)), *costs.mlp_part(1024, half=True)])
    assert parts_us(costs, (1024,)) <= whole + 2 * H200.window_us + 1e-6
    with pytest.raises(ValueError, match="sizes: expected positive numbers of tokens, got"):
        parts_us(costs, (0, 1024))
    assert even_parts(1000, 3) == (320, 320, 360)


def test_the_study_of_parts_prints_a_row_for_each_number_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "llama-3.1-8b", "--tokens", "512,1024", "--transport", "host"])
    lines = capsys.readouterr().out.splitlines()
    assert "host over host-memory" in lines[0] and [line.split()[0] for line in lines[2:]] == ["512", "1024"]


def test_plan_names_link_transport_and_rates() -> None:
    result = CliRunner().invoke(
        app, ["plan", "--model", "llama-3.1-8b", "--tp", "2", "--tokens", "1024", "--transport", "nccl", "--json", "-"]
    )
    report = json.loads(result.stdout)
    assert (report["link"], report["kernel"], report["evidence"]["layers"]) == ("host-memory", "nccl", 2)
    assert report["plans"][0]["mode"] == "split" and "29 GB/s" in report["plans"][0]["rates"]
    shown = CliRunner().invoke(
        app, ["plan", "--model", "llama-3.1-8b", "--tp", "2", "--tokens", "1024", "--transport", "host"]
    )
    assert "transport host" in shown.output
    assert "two_shot 27 us and 41.2 GB/s each way" in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--transport", "p2p"], "--transport: expected one of nccl, host (host-memory), got 'p2p'"),
        (["--transport", "nccl", "--kernel", "push"], "--kernel: expected none with --transport"),
    ],
)
def test_bad_input_of_plan_is_one_line(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", *args])
    assert result.exit_code == 2 and message in result.output


def test_layers_of_links_have_what_their_split_is_compared_with() -> None:
    assert isinstance(LAYER, LayerShape)
    assert [row.unsplit for row in ROWS] == ["unfused_us", "unfused_us"]
    assert [round(row.ratio, 3) for row in ROWS] == [0.749, 0.701]
