"""Device profiles: data that is complete, and refused with its key when it is not."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources
from pathlib import Path

import pytest

from tw_compile.planning import load_profile, profile_names, profile_of_device
from tw_compile.planning.device import parse_profile

TEXT = (resources.files("tw_compile.configs") / "devices" / "h200.toml").read_text()


def test_the_devices_of_the_day_are_shipped() -> None:
    assert profile_names() == ["B200", "H100", "H200"]


@pytest.mark.parametrize("name", ["b200", "h100", "h200"])
def test_every_shipped_number_has_its_source_beside_it(name: str) -> None:
    text = (resources.files("tw_compile.configs") / "devices" / f"{name}.toml").read_text()
    values = [line for line in text.splitlines() if "=" in line.partition("#")[0] and '= "' not in line]
    numbers = [line for line in values if not line.startswith(("ctas", "device_names"))]
    assert len(numbers) > 15
    for line in numbers:
        words = line.partition("#")[2].strip()
        assert words.startswith(
            ("data sheet", "measured", "published", "fitted", "estimate", "shapes", "queries", "as for")
        )


def test_names_are_found_in_any_case_and_by_what_cuda_says() -> None:
    assert load_profile("h200") is load_profile("H200") is profile_of_device("NVIDIA H200")
    assert profile_of_device("A GPU of tomorrow") is None


def test_a_file_of_the_same_form_is_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TEXT.replace('name = "H200"', 'name = "mine"').replace("sms = 132", "sms = 130"))
    profile = load_profile(str(file))
    assert (profile.name, profile.sms) == ("mine", 130)


@pytest.mark.parametrize("name", ["mine.json", "mine", "missing.toml"])
def test_what_is_no_toml_file_is_refused_with_the_shipped_names(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if file.suffix != ".toml":
        file.write_text(TEXT)
    with pytest.raises(ValueError, match=r"expected one of B200, H100, H200 or the path of a TOML file, got '.*mi"):
        load_profile(str(file))


def test_a_file_that_is_no_text_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"expected a file that can be read, got '.*mine\.toml' \('utf-8'"):
        load_profile(str(file))


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"expected one of B200, H100, H200 or the path of a TOML file, got 'A100'"):
        load_profile("A100")
    with pytest.raises(ValueError, match=r"kernel: expected one of two_shot, push, stream \(H200\), got 'beam'"):
        load_profile("H200").fused_kernel("beam")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sms = 132 ", "sms = 0 ", "t: sms: expected a positive int, got 0"),
        ("sms = 132 ", "sms = 1.5 ", "t: sms: expected a positive int, got 1.5"),
        ("launch_us = 2.0", "launch_us = true", "t: launch_us: expected a positive float, got True"),
        ("launch_us = 2.0", "launch = 2.0", "t: expected the keys name, device_names, sms, gpcs, memory_gb_per_s"),
        ("launch_us = 2.0", "launch_us = inf", "t: launch_us: expected a positive float, got inf"),
        ('name = "H200"', "name = 200", "t: name: expected text, got 200"),
        ("in_slot = false", "in_slot = 1", "t: fused.two_shot: in_slot: expected true or false, got 1"),
        ("contention = 1.06", "contention = nan", "t: contention: expected a positive float, got nan"),
        ("contention = 1.06", "contention = 0.9", "t: contention: expected at least 1, got 0.9"),
        ("edge = 14", "rim = 14", "t: gemm: expected the keys tflops_per_sm, edge, tile_us, split_us, most_parts, long_us"),
        ("long_factor = 1.05", "long_factor = 0.9", "t: gemm: long_factor: expected at least 1, got 0.9"),
        ("short_sides = [64, 128]", "short_sides = [128, 64]", "t: gemm: short_sides: expected ascending numbers"),
        ('traffic = "two_shot"', 'traffic = "ring"', "t: all_reduce.nccl: traffic: expected one of multicast, two_shot"),
        ("ctas = [4, 8, 16, 32]", "ctas = []", "t: fused.two_shot: ctas: expected a list that is not empty, got []"),
        ("ctas = [4, 8, 16, 32]", "ctas = [8, 4]", "t: fused.two_shot: ctas: expected ascending numbers, got [8, 4]"),
        ("ctas = [4, 8, 16, 32]", "ctas = [4, 132]", "t: fused.two_shot: ctas: expected fewer than the 132 SMs, got 132"),
        ('kernel = "stream"', 'kernel = "beam"', "t: kernel: expected one of two_shot, push, stream, got 'beam'"),
        ("sms = 132 ", "sms = = ", "t: expected TOML"),
    ],
)  # fmt: skip
def test_a_bad_profile_is_refused_with_the_key(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ValueError) as error:
        parse_profile(TEXT.replace(old, new, 1), "t")
    assert message in str(error.value)


@pytest.mark.parametrize("table", ["attention", "all_reduce", "fused"])
def test_a_profile_without_any_kernel_of_a_kind_is_refused(table: str) -> None:
    sections = re.split(r"^(?=\[)", TEXT, flags=re.MULTILINE)
    others = "".join(one for one in sections if not one.startswith(f"[{table}."))
    with pytest.raises(ValueError, match=f"t: {table}: expected tables by name, got {{}}"):
        parse_profile(f"{table} = {{}}\n{others}", "t")


def test_calls_wait_longer_for_every_rank_up_to_those_that_were_measured() -> None:
    profile = dataclasses.replace(load_profile("H200"), communication_contention=1.25)
    assert [profile.slower_beside(ranks) for ranks in (2, 3, 4, 5, 8)] == [1.25, 1.5, 1.75, 1.75, 1.75]
