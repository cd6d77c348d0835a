"""Which backend an unfused all_reduce would use, and what the gate makes of it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor import config as inductor_config

from tw_compile import Config, TWCompilePass, current
from tw_compile.current import agreed_gate
from tw_compile.gating import (
    ANY,
    BACKENDS,
    Entry,
    Gate,
    HostFacts,
    Node,
    Settings,
    Source,
    Table,
    active_backend,
    host_names,
    table_text,
    tables_of,
    threshold_layers,
)
from tw_compile.gating.backend import backend_bounds
from tw_compile.hosts.vllm.settings import NAMES, VllmSettings
from tw_compile.own_gate import own_gate
from tw_compile.testing import count_ops, fake_process_group, rewrite

KIB, MIB = 2**10, 2**20
SM90 = Node((9, 0), True)
FACTS = st.tuples(
    st.builds(Node, st.sampled_from([None, (8, 0), (9, 0), (10, 0), (10, 3), (10, 7)]), st.booleans(), st.booleans()),
    st.one_of(
        st.builds(
            Settings,
            backend=st.sampled_from(["auto", *BACKENDS]),
            one_shot_max_bytes=st.sampled_from([0, 131072]),
        ),
        st.builds(
            VllmSettings,
            host=st.sampled_from(NAMES),
            backend=st.sampled_from(["auto", *BACKENDS]),
            disable_custom_all_reduce=st.booleans(),
            use_symm_mem=st.booleans(),
            use_nccl_symm_mem=st.booleans(),
            use_flashinfer=st.booleans(),
            flashinfer_backend=st.sampled_from(["auto", "mnnvl", "trtllm"]),
        ),
    ),
)


def settings_of(host: str = "vllm-0.24", **more: Any) -> Settings:
    return (VllmSettings if host in NAMES else Settings)(host, **more)


def backend(
    nbytes: int, world_size: int = 8, node: Node = SM90, dtype: str = "bfloat16", hosts: int = 1, **more: Any
) -> str:
    chosen = settings_of(**more)
    return str(active_backend(node, chosen, world_size=world_size, dtype=dtype, nbytes=nbytes, hosts=hosts).backend)


def gate(node: Node = SM90, **more: Any) -> Gate:
    chosen = settings_of(**more)
    layers = threshold_layers("auto", node.device_class, {"XDG_CONFIG_HOME": "/nonexistent"})
    return Gate(node, chosen, tables_of(layers, node.device_class))


def test_plain_pytorch_uses_nccl_but_for_inductors_one_shot() -> None:
    assert backend(KIB, host="pytorch") == "nccl"
    sizes = (128 * KIB, 128 * KIB + 1)
    seen = [backend(nbytes, host="pytorch", one_shot_max_bytes=128 * KIB) for nbytes in sizes]
    assert seen == ["symm_mem_one_shot", "nccl"]
    assert backend(KIB, host="pytorch", one_shot_max_bytes=128 * KIB, hosts=2) == "nccl"


@pytest.mark.parametrize("host", ["vllm-0.20", "vllm-0.24"])
@pytest.mark.parametrize(
    ("capability", "world_size", "custom_below", "symm_mem", "symm_mem_below"),
    [
        ((9, 0), 2, 8 * MIB, "symm_mem_two_shot", 64 * MIB),
        ((9, 0), 4, 8 * MIB, "multimem", 32 * MIB),
        ((9, 0), 6, 512 * KIB, "multimem", 64 * MIB),
        ((9, 0), 8, 256 * KIB, "multimem", 64 * MIB),
        ((10, 0), 4, 2 * MIB, "symm_mem_two_shot", 32 * MIB),
        ((10, 0), 8, MIB, "multimem", 128 * MIB),
        ((10, 3), 4, 4 * MIB, "symm_mem_two_shot", 32 * MIB),
        ((10, 3), 8, 4 * MIB, "multimem", 64 * MIB),
    ],
)
def test_vllm_goes_from_custom_to_symmetric_memory_to_nccl(
    host: str, capability: tuple[int, int], world_size: int, custom_below: int, symm_mem: str, symm_mem_below: int
) -> None:
    sizes = (16, custom_below - 16, custom_below, symm_mem_below - 16, symm_mem_below)
    seen = [backend(nbytes, world_size, Node(capability, True), host=host) for nbytes in sizes]
    assert seen == ["custom", "custom", symm_mem, symm_mem, "nccl"]


def test_vllm_033_fills_its_symmetric_buffer_to_the_last_byte() -> None:
    off = {"use_flashinfer": False}
    assert [backend(64 * MIB, host=host, **off) for host in ("vllm-0.24", "vllm-0.33")] == ["nccl", "multimem"]
    assert backend(2 * MIB, node=Node((10, 7), True), host="vllm-0.33") == "custom"
    assert backend(4 * MIB, node=Node((10, 7), True), host="vllm-0.33") == "multimem"
    assert backend(4 * MIB, node=Node((10, 7), True), host="vllm-0.24") == "custom"


@pytest.mark.parametrize("host", NAMES)
@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_without_peer_access_all_of_vllm_is_nccl(host: str, capability: tuple[int, int]) -> None:
    """It switches its custom all_reduce off there, and what else is asked for can't be set up."""
    asked = {"use_nccl_symm_mem": True, "use_flashinfer": True, "use_symm_mem": True}
    bounds = backend_bounds(settings_of(host, **asked))
    for nbytes in {16, *(bound + step for bound in bounds for step in (-16, 0, 16))}:
        for world_size in (2, 4, 8):
            for node in (Node(capability, False, peer_access=False), Node(capability, True, peer_access=False)):
                assert backend(nbytes, world_size, node, host=host, **asked) == "nccl"
    assert backend(16, 2, Node(capability, False), host=host, use_flashinfer=False) == "custom"
    active = active_backend(
        Node(capability, False, peer_access=False), settings_of(host), world_size=2, dtype="bfloat16", nbytes=16
    )
    assert "no peer access" in active.why


def test_without_peer_access_small_messages_are_fused(host: str = "vllm-0.24") -> None:
    """That a fast custom all_reduce would be left alone is no reason where there is none."""
    fused = gate(Node((9, 0), False, peer_access=False), host=host)
    verdicts = fused.crossovers(2 * 8192, world_size=8, dtype="bfloat16")
    assert {str(verdict.backend) for verdict in verdicts} == {"nccl"} and all(verdict.fused for verdict in verdicts)
    assert fused.digest() != gate(Node((9, 0), False), host=host).digest()


def test_a_named_backend_is_taken_for_granted_without_peer_access_too() -> None:
    assert backend(16, node=Node((9, 0), False, peer_access=False), backend="custom") == "custom"


def test_inductor_has_no_one_shot_kernel_without_peer_access() -> None:
    small = {"host": "pytorch", "one_shot_max_bytes": 1024}
    assert backend(1024, node=SM90, **small) == "symm_mem_one_shot"
    assert backend(1024, node=Node((9, 0), False, peer_access=False), **small) == "nccl"


@pytest.mark.parametrize(
    "more",
    [{"node": Node((9, 0), False)}, {"use_symm_mem": False}],
)
def test_without_symmetric_memory_custom_goes_to_8_mib(more: dict[str, Any]) -> None:
    assert [backend(nbytes, **more) for nbytes in (256 * KIB, 8 * MIB - 16, 8 * MIB)] == ["custom", "custom", "nccl"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"disable_custom_all_reduce": True}, "multimem"),
        ({"disable_custom_all_reduce": True, "dtype": "float16"}, "nccl"),
        ({"nbytes": 64 * KIB + 4}, "multimem"),
        ({"nbytes": 64 * KIB + 2}, "nccl"),
        ({"world_size": 3}, "nccl"),
        ({"hosts": 2}, "nccl"),
    ],
)
def test_messages_that_the_custom_kernel_does_not_take(more: dict[str, Any], expected: str) -> None:
    assert backend(**{"nbytes": 64 * KIB, **more}) == expected


def test_symmetric_nccl_takes_small_and_large_messages() -> None:
    on = {"use_nccl_symm_mem": True}
    sizes = (16 * KIB, 16 * KIB + 16, 128 * KIB - 16, 128 * KIB, MIB)
    names = ["nccl_symmetric", "custom", "custom", "nccl_symmetric", "nccl_symmetric"]
    assert [backend(nbytes, **on) for nbytes in sizes] == names
    assert [backend(nbytes, 4, **on) for nbytes in (512 * KIB - 16, 512 * KIB)] == ["custom", "nccl_symmetric"]
    assert [backend(64 * KIB, world_size, **on) for world_size in (2, 6, 16)] == ["custom", "custom", "nccl_symmetric"]


def test_flashinfer_goes_before_custom_and_from_033_before_symmetric_nccl() -> None:
    on = {"use_flashinfer": True}
    assert [backend(nbytes, **on) for nbytes in (512 * KIB, 512 * KIB + 16)] == ["flashinfer", "multimem"]
    assert backend(KIB, **on, flashinfer_installed=False) == "custom"
    assert backend(KIB, **on, flashinfer_backend="mnnvl", node=Node((9, 0), False)) == "custom"
    both = on | {"use_nccl_symm_mem": True}
    assert [backend(KIB, host=host, **both) for host in ("vllm-0.24", "vllm-0.33")] == ["nccl_symmetric", "flashinfer"]
    assert backend(128 * MIB, node=Node((10, 0), True), host="vllm-0.33", **on) == "flashinfer"
    assert backend(128 * MIB, node=Node((10, 0), True), host="vllm-0.24", **on) == "nccl"
    assert backend(KIB, node=Node((9, 0), False), host="vllm-0.33", **on) == "flashinfer"


@pytest.mark.parametrize(
    ("host", "capability", "world_size", "hosts", "limit"),
    [
        ("vllm-0.24", (9, 0), 4, 1, 2 * MIB),
        ("vllm-0.24", (10, 3), 8, 1, 2 * MIB),
        ("vllm-0.24", (10, 0), 8, 2, MIB),
        ("vllm-0.33", (9, 0), 8, 1, 512 * KIB),
        ("vllm-0.33", (10, 0), 8, 2, 128 * MIB),
        ("vllm-0.33", (10, 0), 16, 2, 64 * MIB),
        ("vllm-0.33", (10, 3), 4, 1, 80 * MIB),
        ("vllm-0.33", (10, 3), 8, 1, 128 * MIB),
        ("vllm-0.33", (10, 3), 8, 2, 128 * MIB),
        ("vllm-0.33", (10, 3), 8, 3, 4 * MIB),
        ("vllm-0.33", (10, 3), 16, 4, 8 * MIB),
        ("vllm-0.33", (10, 7), 8, 1, 2 * MIB),
    ],
)
def test_flashinfer_takes_messages_up_to_a_limit(
    host: str, capability: tuple[int, int], world_size: int, hosts: int, limit: int
) -> None:
    facts: dict[str, Any] = {"node": Node(capability, True), "host": host, "hosts": hosts, "use_flashinfer": True}
    assert [backend(nbytes, world_size, **facts) == "flashinfer" for nbytes in (limit, limit + 16)] == [True, False]


@pytest.mark.parametrize(
    ("host", "kernels", "hosts", "multicast", "taken"),
    [
        ("vllm-0.24", "auto", 1, False, True),
        ("vllm-0.24", "auto", 2, True, True),
        ("vllm-0.24", "auto", 2, False, False),
        ("vllm-0.24", "trtllm", 2, True, False),
        ("vllm-0.24", "mnnvl", 1, False, False),
        ("vllm-0.33", "auto", 1, False, True),
        ("vllm-0.33", "auto", 2, False, False),
        ("vllm-0.33", "trtllm", 2, True, False),
        ("vllm-0.33", "mnnvl", 1, False, False),
    ],
)
def test_flashinfers_kernels_need_multicast_or_one_host(
    host: str, kernels: str, hosts: int, multicast: bool, taken: bool
) -> None:
    facts: dict[str, Any] = {"host": host, "hosts": hosts, "use_flashinfer": True, "flashinfer_backend": kernels}
    assert (backend(KIB, node=Node((10, 0), multicast), **facts) == "flashinfer") == taken


@pytest.mark.parametrize(("host", "kernels"), [("vllm-0.24", "mnnvl"), ("vllm-0.33", "trtllm")])
def test_only_multicast_kernels_of_033_take_the_largest_messages(host: str, kernels: str) -> None:
    facts: dict[str, Any] = {"node": Node((10, 0), True), "host": host, "flashinfer_backend": kernels}
    assert backend(128 * MIB, use_flashinfer=True, **facts) != "flashinfer"


def test_the_gate_is_told_what_options_say() -> None:
    config = Config(host="vllm-0.33", all_reduce_backend="nccl", disable_custom_all_reduce=True, thresholds="off")
    with inductor_config.patch({"_collective.auto_select": True}):
        one = own_gate(config, SM90)
        plain = own_gate(Config(), SM90)
    assert one.settings.host == "vllm-0.33" and one.settings.backend == "nccl"
    assert one.settings.disable_custom_all_reduce and one.tables[0].file == "no table"
    assert plain.settings.one_shot_max_bytes == inductor_config._collective.one_shot_all_reduce_threshold_bytes > 0


@pytest.mark.parametrize("installed", [False, True])
def test_flashinfer_counts_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    assert own_gate(Config(host="vllm-0.33"), SM90).settings.flashinfer_installed is installed


def test_the_host_may_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(current, "current_node", lambda: SM90)
    observed = current.current_gate(Config(), lambda found: dataclasses.replace(found, backend="multimem"))
    assert observed.settings.backend == "multimem"


@pytest.mark.parametrize("multicast", [False, True])
def test_the_node_is_asked_for_its_capability_and_multicast(multicast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, device))
    monkeypatch.setattr(current.compat, "multicast_support", lambda device: multicast and device == 3)
    assert current.current_node() == Node((10, 3), multicast)


@pytest.mark.parametrize(
    ("capability", "multicast", "expected"),
    [
        (None, True, "generic"),
        ((8, 9), True, "generic"),
        ((9, 0), False, "sm90"),
        ((9, 0), True, "sm90-multicast"),
        ((10, 0), True, "sm100"),
        ((10, 3), True, "sm103"),
        ((10, 7), True, "generic"),
    ],
)
def test_devices_have_a_class(capability: tuple[int, int] | None, multicast: bool, expected: str) -> None:
    assert Node(capability, multicast).device_class == expected
    text = "generic" if capability is None else f"sm{capability[0]}{capability[1]}"
    assert Node.parse(text, multicast) == Node(capability, multicast)


def test_settings_come_from_the_environment() -> None:
    names = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_USE_NCCL_SYMM_MEM": "1", "VLLM_ALLREDUCE_USE_FLASHINFER": "1"}
    assert Settings.from_environment("vllm-0.24", {}) == VllmSettings("vllm-0.24")
    newest = Settings.from_environment("vllm-0.33", {})
    assert isinstance(newest, VllmSettings) and newest.use_flashinfer
    chosen = Settings.from_environment("vllm-0.24", names | {"VLLM_FLASHINFER_ALLREDUCE_BACKEND": "mnnvl"})
    assert isinstance(chosen, VllmSettings)
    assert (chosen.use_symm_mem, chosen.use_nccl_symm_mem, chosen.use_flashinfer) == (False, True, True)
    assert chosen.flashinfer_backend == "mnnvl"
    for name in (*names, "VLLM_FLASHINFER_ALLREDUCE_BACKEND"):
        with pytest.raises(ValueError, match=f"{name}: expected .*, got 'maybe'"):
            Settings.from_environment("vllm-0.24", {name: "maybe"})
    other = Settings.from_environment("pytorch", {"VLLM_ALLREDUCE_USE_SYMM_MEM": "maybe"})
    assert other == Settings("pytorch")
    assert Settings.from_environment("pytorch", {}, HostFacts(one_shot_max_bytes=9)).one_shot_max_bytes == 9
    facts = HostFacts("nccl", disable_custom_all_reduce=True, installed=lambda package: package != "flashinfer")
    assert Settings.from_environment("vllm-0.24", {}, facts) == VllmSettings(
        "vllm-0.24", "nccl", disable_custom_all_reduce=True, flashinfer_installed=False
    )
    with pytest.raises(ValueError, match=r"host: expected one of pytorch, .*, got 'tgi'"):
        Settings("tgi")
    with pytest.raises(TypeError, match=r"host: expected VllmSettings for vllm-0\.24, got Settings"):
        Settings("vllm-0.24")


@pytest.mark.parametrize(("hidden", "tokens"), [(2048, 64), (4096, 32), (7168, 18)])
def test_tp8_on_hopper_is_fused_until_multimem_takes_over(hidden: int, tokens: int) -> None:
    row_bytes = 2 * hidden
    assert 256 * KIB // row_bytes == tokens
    first_left = -(-256 * KIB // row_bytes)
    for count in range(1, 2 * tokens):
        verdict = gate().decide(count * row_bytes, world_size=8, dtype="bfloat16")
        assert verdict.fused == (count < first_left)
        assert verdict.backend == ("custom" if verdict.fused else "multimem")
    crossovers = gate().crossovers(row_bytes, world_size=8, dtype="bfloat16")
    assert [one.nbytes // row_bytes for one in crossovers][:2] == [1, first_left]


def test_the_crossover_follows_the_active_backend() -> None:
    def fused(nbytes: int, **more: Any) -> bool:
        return gate(**more).decide(nbytes, world_size=8, dtype="bfloat16").fused

    band = (256 * KIB, 320 * KIB, 384 * KIB)
    assert not any(fused(nbytes) for nbytes in band)
    assert all(fused(nbytes, use_symm_mem=False) for nbytes in band)
    assert not fused(512 * KIB, use_symm_mem=False)
    nccl_symmetric = [
        fused(nbytes, use_nccl_symm_mem=True) for nbytes in (16 * KIB, 128 * KIB - 16, 128 * KIB, 1 << 30)
    ]
    assert nccl_symmetric == [True, True, False, False]
    assert not fused(256 * KIB, backend="multimem") and fused(256 * KIB - 1, backend="multimem")


@pytest.mark.parametrize("host", host_names())
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_nodes_without_multicast_fuse_everything_as_before(host: str, world_size: int) -> None:
    node = Node((9, 0), False)
    crossovers = gate(node, host=host).crossovers(4096, world_size=world_size, dtype="bfloat16")
    assert all(one.fused for one in crossovers)


@pytest.mark.parametrize(
    ("tokens", "fused"), [((2, None), True), ((64, 1000), False), ((63, 1000), True), ((64, 16384), True)]
)
def test_a_symbolic_token_count_is_left_only_if_all_its_sizes_are(tokens: tuple[int, int | None], fused: bool) -> None:
    verdict = gate().decide_range(tokens, 4096, world_size=8, dtype="bfloat16")
    assert verdict.fused is fused and verdict.note
    sizes = range(tokens[0], (tokens[1] or 20000) + 1)
    every = [gate().decide(count * 4096, world_size=8, dtype="bfloat16").fused for count in sizes]
    assert any(every) is fused
    assert ("would be left" in verdict.note) == (fused and not all(every))


@settings(max_examples=200, deadline=None)
@given(FACTS, st.sampled_from([2, 4, 6, 8, 16]), st.integers(1, 40000), st.sampled_from([1, 2]))
def test_crossovers_miss_nothing(facts: tuple[Node, Settings], world_size: int, tokens: int, hosts: int) -> None:
    node, chosen = facts
    one = Gate(node, chosen, gate(node).tables)
    crossovers = one.crossovers(4096, world_size=world_size, dtype="bfloat16", hosts=hosts)
    verdict = one.decide(tokens * 4096, world_size=world_size, dtype="bfloat16", hosts=hosts)
    last = [other for other in crossovers if other.nbytes <= verdict.nbytes][-1]
    assert (last.backend, last.entry, last.fused) == (verdict.backend, verdict.entry, verdict.fused)


def test_the_digest_changes_with_everything_that_decides() -> None:
    gates = [gate(), gate(Node((9, 0), False)), gate(use_symm_mem=False), gate(host="vllm-0.20")]
    gates.append(Gate(SM90, gate().settings, gate().tables[1:]))
    gates.append(Gate(Node((9, 0), False), gate().settings, gate().tables))
    assert len({one.digest() for one in gates}) == len(gates)
    assert gate().digest() == gate().digest()


@settings(max_examples=20, deadline=None)
@given(st.lists(FACTS, min_size=2, max_size=8), st.integers(1, 2**28), st.integers(2, 8))
def test_ranks_never_disagree(facts: list[tuple[Node, Settings]], nbytes: int, world_size: int) -> None:
    store = dist.HashStore()
    gates = [agreed_gate(Gate(node, chosen, gate(node).tables), store, "key") for node, chosen in facts]
    assert len({one.digest() for one in gates}) == 1
    assert len({one.decide(nbytes, world_size=world_size, dtype="bfloat16") for one in gates}) == 1


def test_a_rank_that_would_decide_otherwise_is_told(tw_log: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    assert agreed_gate(gate(), store, "a") == agreed_gate(gate(), store, "a")
    assert not tw_log.records
    assert agreed_gate(gate(Node((9, 0), False)), store, "a") == gate()
    (record,) = tw_log.records
    assert record.levelno == logging.WARNING and "sm90-multicast.toml" in record.getMessage()
    assert agreed_gate(gate(Node((9, 0), False)), store, "other configuration").node == Node((9, 0), False)


class Block(nn.Module):
    def __init__(self, hidden: int = 2048) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        partial = x * 2
        dist.all_reduce(partial)
        residual = residual + partial
        return self.norm(residual), residual


@pytest.fixture
def on_sm90(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The passes see a Hopper node with multicast."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("tw_compile.pipeline.current_gate", lambda config: own_gate(config, SM90))


def site(
    tokens: int,
    config: Config,
    device: str = "cuda",
    dynamic: bool | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    x = torch.empty(tokens, 2048, dtype=dtype)
    result = rewrite(Block().to(dtype), (x, x), world_size=8, device=device, config=config, dynamic=dynamic)  # type: ignore[arg-type]
    (found,) = result.report.sites
    assert count_ops(result.after.graph, "all_reduce") == (found.decision != "fused")
    return found


VLLM = Config(host="vllm-0.24", strict=True)


def test_the_pass_leaves_what_the_table_leaves_and_says_why(on_sm90: None) -> None:
    fused, left = site(63, VLLM), site(64, VLLM)
    assert (fused.decision, fused.transport, fused.backend) == ("fused", "p2p", "custom")
    assert fused.entry == "sm90-multicast.toml: world_size 8, custom, from 0 bytes to below 512 KiB"
    assert (left.decision, left.reason, left.backend) == ("gated", "faster_unfused", "multimem")
    assert left.entry == "sm90-multicast.toml: world_size 8, multimem, from 256 KiB"
    assert "44079" in left.source and "256 KiB, unfused it would be multimem" in left.detail


@pytest.mark.parametrize(
    "config",
    [
        Config(strict=True),  # plain PyTorch: NCCL
        dataclasses.replace(VLLM, thresholds="off"),
        dataclasses.replace(VLLM, transport="multimem"),
    ],
)
def test_what_no_table_leaves_alone_is_fused_as_before(on_sm90: None, config: Config) -> None:
    assert site(64, config).decision == "fused"


def test_one_graph_for_all_token_counts_is_fused(on_sm90: None) -> None:
    found = site(64, VLLM, dynamic=True)
    assert (found.decision, found.bytes) == ("fused", None)
    assert found.backend == "custom"


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_crosses_hosts_is_decided_by_what_would_carry_it(
    on_sm90: None, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert site(64, VLLM, dynamic=dynamic).backend == "nccl"


def test_the_dtype_decides_with_the_size(on_sm90: None) -> None:
    """torch's symmetric memory takes bf16 alone."""
    assert site(64, VLLM, dtype=torch.float16).backend == "nccl"


def test_the_table_names_the_transport(on_sm90: None, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    source = Source("mine", "default", ("why",))
    file.write_text(table_text(Table("mine", "generic", (Entry(ANY, ANY, 0, None, "fused", "nccl", source),))))
    assert site(64, dataclasses.replace(VLLM, thresholds=str(file))).transport == "nccl"


def test_cpu_tensors_are_not_gated(on_sm90: None) -> None:
    found = site(64, Config(all_reduce_backend="multimem", strict=True), device="cpu")
    assert (found.decision, found.transport, found.entry) == ("fused", "gloo", "")


def test_thresholds_are_part_of_the_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    before = TWCompilePass(VLLM).uuid()
    (tmp_path / "tw_compile").mkdir()
    user = tmp_path / "tw_compile" / "thresholds.toml"
    user.write_text('schema_version = 1\ndevice_class = "generic"\n')
    after = TWCompilePass(VLLM).uuid()
    assert before != after
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    assert TWCompilePass(VLLM).uuid() not in (before, after)


def test_a_malformed_user_file_stops_the_compile(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("schema_version = 1\n")
    with (
        fake_process_group(8),
        pytest.raises(ValueError, match=r"mine\.toml: expected the keys schema_version, device"),
    ):
        TWCompilePass(Config(thresholds=str(file)))(torch.fx.Graph())


@pytest.mark.parametrize("initialized", [False, True])
def test_nothing_is_asked_of_a_device_that_is_not_in_use(initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(current, "current_node", lambda: SM90)
    assert current.current_gate(Config()).node == (SM90 if initialized else Node(None, False))


def test_ranks_of_a_process_group_agree_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    nodes = [SM90]
    monkeypatch.setattr(current, "current_node", lambda: nodes[0])
    for _ in range(2):  # a new process group agrees anew
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        first = current.current_gate(Config())
        assert first.node == nodes[0]
        nodes[0] = Node((10, 0), not nodes[0].multicast)
        assert current.current_gate(Config()) is first
        assert current.current_gate(Config(fuse=False)).node == nodes[0]  # another configuration agrees apart
        dist.destroy_process_group()


def test_in_a_fake_group_nobody_is_there_to_agree_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with fake_process_group(2):
        for node in (SM90, Node((10, 0), True)):
            monkeypatch.setattr(current, "current_node", lambda found=node: found)
            assert current.current_gate(Config()).node == node
