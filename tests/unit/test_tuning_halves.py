"""``tw-compile tune --halves`` without a GPU: what is timed, what is chosen, what is written, and what is refused."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tuning import H200, report_of
from typer.testing import CliRunner

from tw_compile.benchmark.layer import ffn
from tw_compile.benchmark.layer.ffn_spec import FfnSpec, swept_sizes
from tw_compile.cli import common
from tw_compile.cli.app import app
from tw_compile.cli.tune_halves import spec_of, tune_for
from tw_compile.harness.requests import RankError, UsageError
from tw_compile.planning import load_profile, profile_of_device
from tw_compile.planning.device import DeviceProfile, parse_profile
from tw_compile.planning.ffn import merged, plan_ffn
from tw_compile.planning.measured_halves import MeasuredHalves
from tw_compile.planning.presets import preset_layer
from tw_compile.tuning import busy, halves
from tw_compile.tuning.halves_choice import choose, surely_faster
from tw_compile.tuning.halves_profile import MARK, base_profile, kept_halves, write_halves
from tw_compile.tuning.halves_spec import HalvesSpec, HalvesTrial, firsts_of, seconds
from tw_compile.tuning.tables import check_folder, derive, write

H100 = load_profile("H100")
GPU = H100.device_names[0]
LLAMA = "llama-3.3-70b"
ENTRY = MeasuredHalves(8192, 7168, "bfloat16", 2048, 1152, 1126.7, 1153.2, "2026-11-26, a GPU")
TRIAL = HalvesTrial(LLAMA, 4, 8192, 7168, 2048, 1024, (768, 896, 1024, 1152, 1280), 1015.0)


class Clock:
    """Times of halves: microseconds by tokens of half 1, for the first timing and those after it, with ``noise`` in turns."""

    def __init__(self, *us: dict[int, float], noise: float = 0.0) -> None:
        self.us = us
        self.noise = noise
        self.asked: list[list[int]] = []

    def __call__(self, firsts: Sequence[int]) -> dict[int, list[float]]:
        us = self.us[min(len(self.asked), len(self.us) - 1)]
        self.asked.append(list(firsts))
        drift = [1.0, 1.1, 1.0, 0.9, 1.0] * 4
        sign = [1.0, -1.0, 0.0, 1.0, -1.0] * 4
        # The noise of half 1 of few tokens is opposite to that of many, so it does not cancel.
        return {
            first: [
                us.get(first, 1200.0) * drift[turn] * (1.0 + self.noise * sign[turn] * (-1 if first < 1024 else 1))
                for turn in range(20)
            ]
            for first in firsts
        }


def test_halves_that_are_faster_than_the_models_are_taken_with_their_times() -> None:
    clock = Clock({1024: 1153.0, 896: 1140.0, 1152: 1127.0})
    chosen = choose(TRIAL, clock)
    assert (chosen.first, chosen.us, chosen.modelled_us, chosen.equal_us) == (1152, 1127.0, 1153.0, 1153.0)
    assert clock.asked == [[768, 896, 1024, 1152, 1280], [896, 1024, 1152]]
    assert chosen.swept[768] == 1200.0 and set(chosen.swept) == set(TRIAL.firsts)


def test_a_drift_that_all_halves_share_hides_no_difference_and_noise_of_one_does() -> None:
    """The drift is 10% and the difference 0.5%."""
    us = {1024: 1153.0, 896: 1147.0}
    assert choose(TRIAL, Clock(us)).first == 896
    kept = choose(TRIAL, Clock(us, noise=0.01))
    assert (kept.first, kept.us) == (1024, kept.modelled_us)


def test_halves_that_were_fast_once_by_chance_are_not_taken() -> None:
    clock = Clock({1024: 1153.0, 768: 1000.0}, {1024: 1153.0, 768: 1160.0, 896: 1170.0})
    chosen = choose(TRIAL, clock)
    assert (chosen.first, chosen.us) == (1024, 1153.0) and 768 in clock.asked[1]


def test_only_the_second_timing_counts() -> None:
    chosen = choose(TRIAL, Clock({1024: 1153.0, 896: 1140.0}, {1024: 1160.0, 896: 1149.0}))
    assert (chosen.first, chosen.us, chosen.modelled_us, chosen.equal_us) == (896, 1149.0, 1160.0, 1160.0)
    assert chosen.swept[896] == 1140.0


def test_equal_halves_that_no_plan_may_have_are_timed_and_not_taken() -> None:
    trial = replace(TRIAL, tokens=2040, firsts=(896, 1008, 1152), modelled=1008)
    chosen = choose(trial, Clock({1020: 1.0, 1008: 1100.0}))
    assert (chosen.first, chosen.equal_us) == (1008, 1.0)


def test_what_is_faster_in_fewer_than_four_of_five_turns_is_not_surely_faster() -> None:
    assert surely_faster([0.99] * 17 + [1.5] * 3, [1.0] * 20)
    assert not surely_faster([0.9] * 15 + [1.01] * 5, [1.0] * 20)
    assert not surely_faster([1.0] * 20, [1.0] * 20)


@pytest.mark.parametrize(("tokens", "modelled", "multiple"), [(2048, 768, 16), (1000, 384, 48), (64, 32, 16)])
def test_what_is_timed_is_the_sweep_in_whole_multiples_and_the_models_halves(
    tokens: int, modelled: int, multiple: int
) -> None:
    firsts = firsts_of(tokens, modelled, multiple)
    assert modelled in firsts and list(firsts) == sorted(set(firsts)) and firsts[0] > 0 and firsts[-1] < tokens
    assert all(first % multiple == 0 for first in firsts)
    assert {size // multiple * multiple for size in swept_sizes(tokens)} <= {0, *firsts}


def test_the_models_halves_are_those_of_the_benchmark_whatever_was_measured_before() -> None:
    spec = spec_of(replace(H100, halves=(ENTRY,)), (LLAMA,), (4, 8), (1024, 2048), 60.0)
    found = {(trial.shards, trial.tokens): trial.modelled for trial in spec.trials}
    for (shards, tokens), modelled in found.items():
        layer = preset_layer(LLAMA, shards)
        assert layer is not None and modelled == plan_ffn(H100, merged(layer[0]), tokens).first
    assert len(found) == 4


def test_a_models_usual_sizes_take_well_under_a_minute_and_equal_ffns_are_timed_once() -> None:
    one = spec_of(H100, (LLAMA,), (4, 8), (1024, 2048, 4096, 8192), 60.0)
    assert len(one.trials) == 8 and seconds(one) < 45.0
    assert spec_of(H100, ("llama-3.1-8b", "qwen3-8b"), (4,), (2048,), 60.0).trials[0].intermediate_size == 3584


class FakeRanks:
    def __init__(self) -> None:
        self.ctx = types.SimpleNamespace(device=torch.device("cpu"))

    def barrier(self) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_the_benchmarks_timer_times_the_ffns_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 96 tokens, half 1 of 32 is made the fastest."""
    order: list[int] = []

    class Timer:
        def __init__(self, calls: Sequence[Callable[[], object]], count: int) -> None:
            (self.call,) = calls
            assert count == 4

        def run(self) -> float:
            self.call()
            (_, first, _) = self.call.args  # type: ignore[attr-defined]
            order.append(first)
            return {32: 10.0, 48: 20.0}.get(first, 30.0)

    monkeypatch.setattr(ffn, "LoopTimer", Timer)
    trial = HalvesTrial("m", 2, 64, 32, 96, 64, (32, 48, 64), 1.0)
    spec = HalvesSpec((trial, replace(trial, tokens=64, modelled=32, firsts=(32,))), device="cpu", dtype="float32")
    told: list[str] = []
    kept: list[Any] = []
    found = halves.measure(spec, FakeRanks(), told.append, kept.append)["rows"]  # type: ignore[arg-type]
    assert [(row["first"], row["us"], row["modelled_us"], row["equal_us"]) for row in found] == [
        (32, 10.0, 30.0, 20.0),
        (32, 10.0, 10.0, 10.0),
    ]
    assert told == ["m, TP2, 96 tokens", "m, TP2, 64 tokens"] and len(kept) == 2
    assert order[:6] == [32, 48, 64, 48, 64, 32]  # another one begins each turn


def test_what_is_written_is_what_the_planner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_halves(tmp_path / "tw_compile", GPU, (ENTRY,), "Written by a test")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    profile = profile_of_device(GPU)
    assert profile == replace(H100, name="H100, tuned", halves=(ENTRY,))
    text = file.read_text()
    assert text.startswith("# Written by a test\n") and text.count("# as shipped") > 50


def test_all_else_in_the_file_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "device.toml"
    own = (Path(common.__file__).parents[2] / "configs/devices/h100.toml").read_text()
    file.write_text(own)
    write_halves(tmp_path, GPU, (ENTRY,), "not used")
    newer = replace(ENTRY, first=896)
    write_halves(tmp_path, GPU, (newer, replace(ENTRY, tokens=1024, first=640)), "not used")
    text = file.read_text()
    assert text.partition(f"\n{MARK}\n")[0] == own and text.count(MARK) == 1 and text.count("[[halves]]") == 2
    assert {entry.tokens: entry.first for entry in kept_halves(tmp_path, GPU)} == {1024: 640, 2048: 896}


def test_files_that_would_be_lost_are_refused_and_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "device.toml"
    write_halves(tmp_path, GPU, (ENTRY,), "")
    with pytest.raises(UsageError, match=f"--out: expected a folder whose profile is about {H200}, got .* about {GPU}"):
        base_profile(tmp_path, H200)
    moved = file.read_text().replace(MARK, "# mine")
    file.write_text(moved)
    with pytest.raises(UsageError, match=r"--out: expected a file whose tables .* are behind the line '# Halves"):
        write_halves(tmp_path, GPU, (replace(ENTRY, tokens=1024, first=640),), "")
    assert file.read_text() == moved
    file.write_text("sms = 0\n")
    for refuse in (base_profile, lambda folder, name: check_folder(folder, None, name)):
        with pytest.raises(UsageError, match=r"--out: expected a profile that can be read, got .*device.toml"):
            refuse(tmp_path, GPU)


def test_a_device_without_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--halves: expected a device with a profile \(B200, H100, H200\), got 'A100'"
    ):
        base_profile(tmp_path, "A100")


def test_tuning_everything_else_keeps_the_halves(tmp_path: Path) -> None:
    write_halves(tmp_path, H200, (ENTRY,), "")
    derived = derive(report_of())
    write(tmp_path, derived, "all else")
    profile = parse_profile((tmp_path / "device.toml").read_text(), "mine")
    assert derived.profile is not None and profile == replace(derived.profile, halves=(ENTRY,))
    write_halves(tmp_path, H200, (replace(ENTRY, tokens=1024, first=640),), "")
    assert len(kept_halves(tmp_path, H200)) == 2


def _on_a_gpu(monkeypatch: pytest.MonkeyPatch, used: int = 0, name: str = GPU) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 1)
    monkeypatch.setattr(busy, "usages", lambda count: [busy.Usage(index, used) for index in range(count)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: name)


def _run(incomplete: str | None = None) -> Callable[..., dict[str, Any]]:
    def run(spec: HalvesSpec, progress: Callable[[str], None]) -> dict[str, Any]:
        rows = []
        for trial in spec.trials:
            progress(str(trial))
            first = trial.firsts[-1]
            us = {"first": first, "us": 90.0, "modelled_us": 95.0, "equal_us": 97.0, "swept": {}}
            rows.append({**asdict(trial), **us, "dtype": spec.dtype})
        versions = {"date": "2026-11-27", "torch": "2.11.0", "commit": "abc"}
        return {"command": "tune", "device_name": GPU, "machine": "here", "rows": rows, "versions": versions} | {
            "incomplete": incomplete
        }

    return run


def test_the_command_writes_profile_and_times_and_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on_a_gpu(monkeypatch)
    monkeypatch.setattr(halves, "run", _run())
    args = ["tune", "--halves", LLAMA, "--tp", "4", "--tokens", "2048", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*args, "--json", str(tmp_path / "report.json")], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    for words in (
        "1/3 llama-3.3-70b, TP4, 2048 tokens",
        "1408 + 640",
        "1024 + 1024",
        "halves of layers are the model's",
    ):
        assert words in result.output
    (entry,) = kept_halves(tmp_path, GPU)
    assert entry == MeasuredHalves(
        8192, 7168, "bfloat16", 2048, 1408, 90.0, 97.0, f"2026-11-27, {GPU}, torch 2.11.0, tw_compile abc"
    )
    assert json.loads((tmp_path / "tune-halves.json").read_text()) == json.loads((tmp_path / "report.json").read_text())


def test_what_a_figure_needs_is_tuned_once_and_what_the_profile_has_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_a_gpu(monkeypatch)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "tw_compile"
    timed: list[Any] = []
    write_halves(folder, GPU, (ENTRY,), "")

    def run(spec: HalvesSpec, progress: Callable[[str], None]) -> dict[str, Any]:
        timed.extend([*((trial.shards, trial.tokens) for trial in spec.trials), spec.timeout])
        return _run()(spec, progress)

    monkeypatch.setattr(halves, "run", run)
    wanted = [FfnSpec(LLAMA, 4, (1024, 2048)), FfnSpec(LLAMA, 8, (1024,)), FfnSpec(LLAMA, 8, (1024,))]
    said: list[str] = []
    assert tune_for(wanted, 3.0, said.append) is None and timed == [(4, 1024), (8, 1024), 180.0]
    assert said[0].startswith("tune --halves: llama-3.3-70b, TP4") and said[-1] == f"wrote {folder / 'device.toml'}"
    kept = kept_halves(folder, GPU)
    assert ENTRY in kept and {(entry.intermediate_size, entry.tokens) for entry in kept} == {
        (7168, 1024),
        (7168, 2048),
        (3584, 1024),
    }
    _on_a_gpu(monkeypatch, used=2**34)  # nothing is missing, so nobody asks
    assert tune_for(wanted, 3.0, said.append) is None and len(timed) == 3


def test_what_cannot_be_tuned_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    wanted = [FfnSpec(LLAMA, 4, (1024,))]
    _on_a_gpu(monkeypatch, used=2**34)
    assert "expected an idle GPU" in str(tune_for(wanted, 3.0, print))
    _on_a_gpu(monkeypatch, name="NVIDIA T4")
    assert str(tune_for(wanted, 3.0, print)).startswith("expected a device with a profile")
    _on_a_gpu(monkeypatch)

    def fail(spec: HalvesSpec, progress: Callable[[str], None]) -> dict[str, Any]:
        raise RankError("tune: rank 0 died\nand more")

    monkeypatch.setattr(halves, "run", fail)
    assert tune_for(wanted, 3.0, print) == "tune: rank 0 died"
    monkeypatch.setattr(halves, "run", _run(incomplete="no answer in 600 s"))
    assert tune_for(wanted, 3.0, print) == "no answer in 600 s" and len(kept_halves(tmp_path / "tw_compile", GPU)) == 1
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    monkeypatch.setattr(halves, "run", fail)
    assert str(tune_for(wanted, 3.0, print)).startswith("expected a folder that is there or can be made")


def test_ctrl_c_ends_the_tuning_and_what_comes_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    _on_a_gpu(monkeypatch)
    monkeypatch.setattr(halves, "run", _run(incomplete="interrupted"))
    with pytest.raises(KeyboardInterrupt):
        tune_for([FfnSpec(LLAMA, 4, (1024,))], 3.0, print)
    assert len(kept_halves(tmp_path / "tw_compile", GPU)) == 1


def test_a_file_that_halves_do_not_fit_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_halves(tmp_path, GPU, (ENTRY,), "")
    file = tmp_path / "device.toml"
    file.write_text(file.read_text().replace(MARK, "# mine"))
    _on_a_gpu(monkeypatch)
    monkeypatch.setattr(halves, "run", lambda *asked: pytest.fail("measured"))
    result = CliRunner().invoke(app, ["tune", "--halves", LLAMA, "--out", str(tmp_path)])
    assert result.exit_code == 2 and "are behind the line" in result.output


def test_what_was_done_before_the_time_was_over_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on_a_gpu(monkeypatch)
    monkeypatch.setattr(halves, "run", _run("no result after 9 s"))
    args = ["tune", "--halves", LLAMA, "--tp", "4", "--tokens", "2048", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1 and "incomplete: no result after 9 s" in result.output
    assert len(kept_halves(tmp_path, GPU)) == 1

    def fail(spec: HalvesSpec, progress: Callable[[str], None]) -> dict[str, Any]:
        raise RankError("rank 0 died")

    monkeypatch.setattr(halves, "run", fail)
    assert CliRunner().invoke(app, args).exit_code == 1 and len(kept_halves(tmp_path, GPU)) == 1


def test_a_dry_run_says_what_would_be_timed_and_writes_nothing(tmp_path: Path) -> None:
    args = ["tune", "--halves", LLAMA, "--tp", "8", "--tokens", "2048", "--dry-run", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*args, "--json", "-"])
    assert result.exit_code == 0 and list(tmp_path.iterdir()) == []
    (trial,) = json.loads(result.stdout)["trials"]
    assert (trial["intermediate_size"], trial["modelled"]) == (3584, 768)
    assert "640, 768*, 896" in result.output and f"would write to {tmp_path}" in result.output


@pytest.mark.parametrize(
    ("args", "named", "came"),
    [
        (["--halves", "mixtral-8x7b", "--dry-run"], "--halves: expected models without experts", "mixtral-8x7b"),
        (["--halves", "no-model"], "--halves no-model: source: expected", "no-model"),
        (["--halves", LLAMA, "--tp", "3"], f"--halves {LLAMA}: --tp: expected a divisor", "3"),
        (["--halves", LLAMA, "--tp", "1"], "--tp: expected 2 to", "1"),
        (["--halves", f"{LLAMA},{LLAMA}"], "--halves: expected different models", LLAMA),
        (["--halves", LLAMA, "--tokens", "31"], "--tokens: expected 32 to 65536 tokens", "31"),
        (["--halves", LLAMA, "--tokens", "many"], "--tokens: expected different positive numbers", "many"),
        (["--halves", LLAMA, "--device", "cpu"], "--device: expected cuda with --halves", "cpu"),
        (["--halves", LLAMA, "--quick"], "--quick: expected none with --halves", "--quick"),
        (["--halves", LLAMA, "--wire", "int8"], "--wire: expected none with --halves", "int8"),
        (["--halves", LLAMA, "--wire-sites", "mlp"], "--wire-sites: expected none with --halves", "mlp"),
        (["--halves", LLAMA, "--transport", "nccl"], "--transport: expected none with --halves", "nccl"),
        (["--halves", LLAMA], "--halves: expected a GPU", "none"),
        (["--tokens", "2048"], "--tokens: expected --halves with it", "2048"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_that_names_the_option(
    args: list[str], named: str, came: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 0)
    result = CliRunner().invoke(app, ["tune", *args])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"error: {named}") and came in line


def test_a_busy_gpu_is_refused_before_anything_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on_a_gpu(monkeypatch, used=2**35)
    result = CliRunner().invoke(app, ["tune", "--halves", LLAMA, "--out", str(tmp_path)])
    assert result.exit_code == 2 and "error: tune: expected an idle GPU, got GPU 0 has 32.0 GiB in use" in result.output


def test_plan_and_doctor_say_what_was_measured_and_that_layers_are_modelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_halves(tmp_path, GPU, (ENTRY,), "")
    args = ["plan", "--model", LLAMA, "--tp", "4", "--tokens", "1024,2048", "--device-profile", str(file), "--json"]
    result = CliRunner().invoke(app, [*args, str(tmp_path / "plan.json")])
    assert result.output.count("an FFN alone") == 1
    assert (
        "the halves above are the model's: 1152 + 896 of 2048 tokens: 1126.7 us, equal halves 1153.2 us"
        in result.output
    )
    assert json.loads((tmp_path / "plan.json").read_text())["ffn_halves"] == [asdict(ENTRY)]
    from tw_compile.runner import machine

    monkeypatch.setattr(machine, "user_profile", lambda: own(file))
    (*_, user, _) = machine.device_profile_report([{"name": GPU}], [])["layers"]
    assert user["state"] == "H100, tuned, halves of 1 FFNs measured"


def own(file: Path) -> DeviceProfile:
    return parse_profile(file.read_text(), str(file))


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_process_of_its_own_times_the_ffns() -> None:
    trial = HalvesTrial("m", 2, 64, 32, 96, 64, (32, 48, 64), 1.0)
    told: list[str] = []
    report = halves.run(HalvesSpec((trial,), device="cpu", dtype="float32", timeout=100.0), told.append)
    assert report["incomplete"] is None and len(told) == 3 and report["versions"]["torch"]
    (row,) = report["rows"]
    assert row["first"] in trial.firsts and row["us"] > 0 and set(row["swept"]) == set(trial.firsts)
