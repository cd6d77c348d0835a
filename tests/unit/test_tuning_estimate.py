"""What the planner gets of a calibration, from times that a known device would have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrations import FOUND, SM90
from typer.testing import CliRunner

from tw_compile import calibration, current
from tw_compile.benchmark.results import Row
from tw_compile.calibration import calibration_of, default_folder, store, text_of
from tw_compile.cli.app import app
from tw_compile.cli.plan import layer_of_model
from tw_compile.config import Config
from tw_compile.gating.table import Source
from tw_compile.planning import DeviceProfile, evidence, load_profile, plan_layer
from tw_compile.planning.communication import all_reduce_us, fused_us, link_us, rms_norm_us
from tw_compile.planning.evidence import ESTIMATED_MARGIN
from tw_compile.planning.gemm import Gemm, gemm_time
from tw_compile.planning.links import link_of_node, shipped_link
from tw_compile.planning.plan import Mode
from tw_compile.runner import machine
from tw_compile.tuning.estimate import GEMM, estimated_profile, measured_link
from tw_compile.tuning.measured import KernelRun
from tw_compile.tuning.profile import latency_and_rate
from tw_compile.tuning.short import HIDDEN, TOKENS

NAME, RANKS, SMS = "NVIDIA A100-SXM4-80GB", 2, 108
H200 = load_profile("H200")
NODE: DeviceProfile = replace(
    H200,
    sms=SMS,
    memory_gb_per_s=1500.0,
    gemm=replace(H200.gemm, tflops_per_sm=2.6, memory_gb_per_s=1615.0),
    all_reduce={"nccl": replace(H200.all_reduce["nccl"], latency_us=20.0, link_gb_per_s=200.0)},
    fused={"push": replace(H200.fused["push"], latency_us=6.0, link_gb_per_s=180.0, ctas=(32, 64))},
)
"""As if it were the truth about a node."""
RUN_OF = Source("measured_tp2", "measured", ("2x", "torch", "2026-11-24", "tw_compile.calibrate"))


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    yield
    calibration.use(None)


def row(label: str, tokens: int, us: float, algorithm: str | None = None, sms: int | None = None) -> Row:
    kind = "ours" if algorithm else "bound" if label in (GEMM, "no-communication") else "peer"
    form = ("sharded float32" if algorithm else "replicated bfloat16", sms, "timed", None, "ok", us, us, us)
    return Row(label, kind, tokens, HIDDEN, 2 * tokens * HIDDEN, 1, *form, algorithm=algorithm, max_sms=sms)  # type: ignore[arg-type]


def run(*leave_out: str) -> KernelRun:
    rows = []
    for tokens in sorted(TOKENS):
        nbytes = 2 * tokens * HIDDEN
        norm = rms_norm_us(NODE, nbytes)
        rows.append(row("no-communication", tokens, norm))
        rows.append(row("nccl+norm", tokens, norm + all_reduce_us(NODE, nbytes, RANKS, False)))
        us = fused_us(NODE.fused["push"], tokens, HIDDEN, RANKS, 128, staged=True)
        rows.append(row("tw-push-two-shot", tokens, us, "push_two_shot", 128))
        if tokens in (256, 1024):
            rows.append(row(GEMM, tokens, gemm_time(NODE, Gemm(GEMM, HIDDEN, HIDDEN // RANKS), tokens, SMS).us))
            us = fused_us(NODE.fused["push"], tokens, HIDDEN, RANKS, 32, staged=True)
            rows.append(row("tw-push-two-shot-32sm", tokens, us, "push_two_shot", 32))
    return KernelRun(RANKS, NAME, RUN_OF, tuple(each for each in rows if each.label not in leave_out))


def estimated() -> DeviceProfile:
    profile = estimated_profile(NAME, "generic", SMS, run())
    assert profile is not None
    return profile


def test_what_was_timed_comes_out_as_it_is() -> None:
    profile = estimated()
    assert (profile.sms, profile.device_names, profile.estimated) == (SMS, (NAME,), True)
    assert profile.memory_gb_per_s == pytest.approx(1500, rel=0.02)
    assert profile.gemm.tflops_per_sm == pytest.approx(2.6, rel=0.02) and not profile.gemm.own_gemms
    nccl, push = profile.all_reduce["nccl"], profile.fused["push"]
    assert (nccl.latency_us, nccl.link_gb_per_s) == (pytest.approx(20, rel=0.05), pytest.approx(200, rel=0.02))
    assert push.link_gb_per_s == pytest.approx(180, rel=0.15) and push.ctas == (4, 8, 16, 32, 64)
    assert push.cta_gb_per_s == pytest.approx(H200.fused["push"].cta_gb_per_s, rel=0.25)
    assert list(profile.fused) == [profile.kernel] == ["push"]  # of the others nothing is known here
    ratio = 2.6 * SMS / (H200.gemm.tflops_per_sm * H200.sms)
    assert profile.attention["flash"].tflops == pytest.approx(H200.attention["flash"].tflops * ratio, rel=0.02)


@pytest.mark.parametrize("lacking", ["no-communication", GEMM, "nccl+norm"])
def test_too_little_is_no_profile(lacking: str) -> None:
    assert estimated_profile(NAME, "generic", SMS, run(lacking)) is None


def test_a_split_must_gain_more_where_little_is_known() -> None:
    known, unknown = evidence(H200), evidence(estimated())
    assert unknown.margin == ESTIMATED_MARGIN > evidence(load_profile("B200")).margin > known.margin
    assert "10.0%, because of the device little but calls, a GEMM and a norm was measured" in str(unknown)
    plan = plan_layer(estimated(), layer_of_model("llama-3.3-70b", RANKS)[0], 4096)
    assert plan.margin == ESTIMATED_MARGIN and plan.predicted.split_us is not None
    assert (plan.mode is not Mode.OFF) is (plan.saved_us > ESTIMATED_MARGIN * plan.predicted.unsplit_us)


def kept(**values: Any) -> calibration.Calibration:
    here = current.measured_on(NAME, RANKS, replace(SM90, capability=(8, 0)), True)
    return replace(FOUND, measured_on=here, profile=estimated(), **values)


def test_the_file_has_profile_and_link() -> None:
    link = replace(shipped_link(), name="host-memory")
    found = kept(link=link)
    assert calibration_of(text_of(found), "file") == found
    bad = json.dumps(json.loads(text_of(found)) | {"profile": "sms = 3"})
    with pytest.raises(ValueError, match="file: profile: expected the keys name, "):
        calibration_of(bad, "file")


def test_a_device_without_a_profile_is_planned_for_by_what_ranks_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(current.torch.cuda, "get_device_name", lambda: NAME)
    assert current.current_profile(Config()) is None
    calibration.use(kept())
    assert current.current_profile(Config()) == estimated()
    assert current.current_profile(Config(calibrate="off")) is None
    assert current.current_profile(Config(device_profile="H100")) == load_profile("H100")
    monkeypatch.setattr(current.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert current.current_profile(Config()) == H200  # a shipped one has measured layers


def test_rates_of_host_memory_are_those_that_were_measured(tmp_path: Path) -> None:
    base = shipped_link()
    way = base.transport("nccl").ways["ring"]
    faster = replace(base.transport("nccl"), ways={"ring": replace(way, latency_us=14.0, gb_per_s=50.0)})
    rows = []
    for tokens in TOKENS:
        nbytes, norm = 2 * tokens * HIDDEN, rms_norm_us(H200, 2 * tokens * HIDDEN)
        rows.append(row("no-communication", tokens, norm))
        rows.append(row("nccl+norm", tokens, norm + link_us(faster, nbytes, RANKS)))
        us = 0.5 * link_us(base.transport("host"), nbytes, RANKS)
        rows.append(row("tw-host-two-shot", tokens, us, "host_two_shot", 16))
        rows.append(row("tw-host-words", tokens, 2 * us, "host_words", 128))
    link = measured_link(base, KernelRun(RANKS, NAME, RUN_OF, tuple(rows)))
    assert link is not None
    ring = link.transport("nccl").ways["ring"]
    assert (ring.latency_us, ring.gb_per_s) == (pytest.approx(14, rel=0.02), pytest.approx(50, rel=0.02))
    for tokens in TOKENS:
        before, after = (link_us(each.transport("host"), 2 * tokens * HIDDEN, RANKS) for each in (base, link))
        assert after == pytest.approx(0.5 * before, rel=0.1)
    assert measured_link(base, run()) is None  # by peer memory: nothing is known of that link
    assert link_of_node(link) == link and link_of_node() == base


def test_commands_name_the_calibration() -> None:
    store(default_folder(), kept())
    gpus = [{"name": NAME}]
    states = [line["state"] for line in machine.device_profile_report(gpus, [kept()])["layers"]]
    assert states[:2] == [estimated().name, "none for this device"]
    assert estimated().name == f"{NAME}, estimated by a calibration of 2 ranks"

    def output(*args: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*args, "--json", "-"])
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.stdout))

    plan = output("plan", "--device-profile", NAME, "--tp", "2", "--tokens", "4096")
    assert plan["device_profile"] == estimated().name and plan["evidence"]["margin"] == ESTIMATED_MARGIN
    explain = ("explain", "--device", "generic", "--tp", "2", "--tokens", "4096", "--model", "llama-3.3-70b")
    assert output(*explain)["device_profile"] == estimated().name
    shown = CliRunner().invoke(app, explain)
    assert f"planned for {estimated().name}" in " ".join(shown.output.split())


def test_a_fit_that_rounds_to_zero_is_discarded() -> None:
    fit = latency_and_rate([(traffic, 0.003 + traffic / 1e5) for traffic in (1e3, 1e4, 1e5, 1e6)])
    assert fit is None or fit[0] > 0  # with 0 the file can't be read back
