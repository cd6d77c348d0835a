"""The backend and the pass object as hosts see them: options, a user's own pass, caches, identity."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from tw_compile import Config, TWCompilePass, collect_reports, make_backend, pipeline, sources
from tw_compile.hosts.vllm.reasons import HostRefusal
from tw_compile.passes import split
from tw_compile.passes.split.rules import registry
from tw_compile.planning import load_profile
from tw_compile.testing import count_ops, fake_process_group, snapshot

H = 16


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    with fake_process_group(2):
        yield


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor stops after its post-grad passes; compiled graphs are interpreted."""
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    def interpret(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
        post_grad_passes(gm, is_inference=True)
        gm.recompile()

        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    original = compile_fx.compile_fx

    def compile_without_code(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        patches = kwargs.pop("config_patches", None) or {}

        def inner(gm: fx.GraphModule, inputs: list[Any], **inner_kwargs: Any) -> Callable[..., Any]:
            with inductor_config.patch(patches):
                return interpret(gm, inputs, **inner_kwargs)

        return original(gm, inputs, inner_compile=inner, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx", compile_without_code)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        partial = x * 2
        dist.all_reduce(partial)
        return self.norm(partial + residual)


class Recorder(CustomGraphPass):
    """A user's pass: notes what it sees and which Inductor options hold."""

    def __init__(self, identity: Any = b"mine") -> None:
        self.identity = identity
        self.all_reduces: list[int] = []
        self.settings: list[dict[str, Any]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.all_reduces.append(count_ops(graph, "all_reduce"))
        names = ("max_autotune", "triton.cudagraphs", "shape_padding")
        known = inductor_config.get_config_copy()
        self.settings.append({name: known[name] for name in names})

    def uuid(self) -> Any:
        return self.identity


def compiled(rows: int = 4, **kwargs: Any) -> tuple[torch.Tensor, dict[str, int]]:
    torch._dynamo.reset()
    module, x = Block(), torch.ones(rows, H)
    with torch.no_grad(), collect_reports() as reports:
        result = torch.compile(module, **kwargs)(x, x)
    return result, reports[-1].counts if reports else {}


def test_backend_is_found_by_name(no_codegen: None) -> None:
    result, counts = compiled(backend="tw_compile")
    assert counts["fused"] == 1
    assert "tw_compile" in torch._dynamo.list_backends()
    torch.testing.assert_close(result, torch.ones(4, H))


@pytest.mark.parametrize("where", ["options", "global config"])
def test_users_own_pass_still_runs_and_runs_first(no_codegen: None, where: str) -> None:
    mine = Recorder()
    options = {"post_grad_custom_post_pass": mine} if where == "options" else {}
    patch = {} if where == "options" else {"post_grad_custom_post_pass": mine}
    with inductor_config.patch(patch):
        _, counts = compiled(backend="tw_compile", options=options)
    assert (mine.all_reduces, counts["fused"]) == ([1], 1)


def test_inductor_options_are_honoured(no_codegen: None) -> None:
    mine = Recorder()
    options = {"post_grad_custom_post_pass": mine, "shape_padding": False, "triton.cudagraphs": True}
    compiled(backend="tw_compile", options=options)
    assert (mine.settings[0]["shape_padding"], mine.settings[0]["triton.cudagraphs"]) == (False, True)


@pytest.mark.parametrize(
    ("mode", "option"), [("reduce-overhead", "triton.cudagraphs"), ("max-autotune", "max_autotune")]
)
def test_modes(no_codegen: None, mode: str, option: str) -> None:
    mine = Recorder()
    with inductor_config.patch(post_grad_custom_post_pass=mine):
        _, counts = compiled(backend="tw_compile", mode=mode)
    assert mine.settings[0][option] is True and counts["fused"] == 1


def test_dynamic_compiles_once(no_codegen: None) -> None:
    with torch.no_grad(), collect_reports() as reports:
        function = torch.compile(Block(), backend="tw_compile", dynamic=True)
        for rows in (5, 7, 64):
            function(torch.ones(rows, H), torch.ones(rows, H))
    assert [report.counts["fused"] for report in reports] == [1]


def test_options_reach_the_passes(no_codegen: None) -> None:
    _, counts = compiled(backend="tw_compile", options={"tw_compile.fuse": False})
    assert counts == {"all_reduce": 1, "fused": 0, "refused": 0, "gated": 1}


@pytest.mark.parametrize("key", ["tw_compile.fuze", "max_autotunes"])
def test_unknown_option_is_named(no_codegen: None, key: str) -> None:
    with pytest.raises(Exception, match=key):
        compiled(backend="tw_compile", options={key: True})


def test_make_backend_with_a_mode(no_codegen: None) -> None:
    _, counts = compiled(backend=make_backend(Config(fuse=False)), mode="reduce-overhead")
    assert counts["gated"] == 1
    with pytest.raises(Exception, match=r"tw_compile.\* options: expected none beside make_backend"):
        compiled(backend=make_backend(Config()), options={"tw_compile.fuse": False})
    with pytest.raises(Exception, match=r"tw_compile.\* options: expected none beside make_backend"):
        compiled(backend=make_backend(Config(fuse=False)), options={"tw_compile.fuse": True})


def test_what_is_no_config_or_pass_is_refused_when_it_is_given() -> None:
    given: Any = {"fuse": False}
    for make in (make_backend, TWCompilePass):
        with pytest.raises(TypeError, match=r"config: expected a tw_compile.Config, got {'fuse': False}"):
            make(given)
    with pytest.raises(TypeError, match="before: expected a pass, which is called with a graph, got 3"):
        TWCompilePass(before=3)  # type: ignore[arg-type]


def test_what_a_host_rules_out_is_left_and_reported() -> None:
    b = GraphBuilder()
    issued = b.issue(b.input(4, H))
    issued.meta["nn_module_stack"] = {"a": ("L['self'].model.layers.3.mlp", object)}
    graph = b.finish(b.rms_norm(b.wait(issued), b.input(H)))
    before = snapshot(graph)
    with collect_reports() as reports:
        result = TWCompilePass().refuse(graph, HostRefusal.DUAL_BATCH_OVERLAP, "two threads")
    assert reports == [result] and result.refusals == {"dual_batch_overlap": 1} and snapshot(graph) == before
    (site,) = result.sites
    assert (site.layer, site.detail, site.node) == (3, "two threads", issued.name)


def test_stock_inductor_with_the_bare_pass_and_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one test here that generates code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.fx_graph_cache", True)
    seen = []
    for config in (Config(), Config(), Config(fuse_min_bytes=1)):
        counters.clear()
        result, counts = compiled(backend="inductor", options={"post_grad_custom_post_pass": TWCompilePass(config)})
        torch.testing.assert_close(result, torch.ones(4, H))
        inductor = counters["inductor"]
        seen.append((inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"], counts.get("fused")))
    assert seen == [(0, 1, 1), (1, 0, None), (0, 1, 1)]


def test_uuid_is_stable() -> None:
    assert TWCompilePass().uuid() == TWCompilePass(Config()).uuid()


@pytest.mark.parametrize("field", [{"fuse": False}, {"transport": "nccl"}, {"fuse_min_bytes": 1}, {"strict": True}])
def test_uuid_changes_with_the_configuration(field: dict[str, Any]) -> None:
    assert TWCompilePass(Config(**field)).uuid() != TWCompilePass().uuid()


@pytest.mark.parametrize("name", ["pass.py", "kernel.cu", "sync.cuh", "link.toml"])
def test_uuid_changes_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = TWCompilePass().uuid()
    source = tmp_path / name
    seen = {before}
    for text in ("a = 1\n", "a = 2\n"):
        source.write_text(text)
        monkeypatch.setattr(sources, "SOURCES", (tmp_path,))
        sources.digest_of.cache_clear()
        seen.add(TWCompilePass().uuid())
    assert len(seen) == 3


def test_uuid_changes_with_the_name_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SOURCES", (tmp_path,))
    seen = set()
    for name in ("one.py", "two.py"):
        sources.digest_of.cache_clear()
        source = tmp_path / name
        source.write_text("a = 1\n")
        seen.add(TWCompilePass().uuid())
        source.unlink()
    assert len(seen) == 2


def test_uuid_changes_with_the_device_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for profile in (None, load_profile("H200")):
        monkeypatch.setattr(pipeline, "current_profile", lambda config, found=profile: found)
        seen.add(TWCompilePass().uuid())
    assert len(seen) == 2


def test_uuid_covers_every_source_folder() -> None:
    """And the tables: a calibration keeps numbers of a shipped link or profile, and must not outlive them."""
    names = {path.name for folder in sources.SOURCES for path in folder.rglob("*.*")}
    assert {"find.py", "ops.py", "duplicate.py", "pipeline.py", "lowering.py", "host-memory.toml", "h100.toml"} <= names


def test_uuid_changes_with_users_rules_and_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was split by another rule must not come out of a cache."""
    monkeypatch.setattr(registry, "rules", dict(registry.rules))
    monkeypatch.setattr(registry, "attention_operators", set(registry.attention_operators))
    seen = {TWCompilePass().uuid()}

    def declare(version: int) -> None:
        file = tmp_path / f"rules_{version}.py"
        file.write_text(f"def rule(call):\n    return call.row_wise_over({version}, dim=0)\n")
        spec = importlib.util.spec_from_file_location(f"rules_{version}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        split.token_rule("mylib::op")(module.rule)

    for version in (1, 2):
        declare(version)
        seen.add(TWCompilePass().uuid())
    assert TWCompilePass().uuid() in seen
    split.declare_attention("mylib::op")
    seen.add(TWCompilePass().uuid())
    assert len(seen) == 4


def test_uuid_changes_with_the_groups() -> None:
    before = TWCompilePass().uuid()
    dist.new_group([0])
    after = TWCompilePass().uuid()
    dist.destroy_process_group()
    assert len({before, after, TWCompilePass().uuid()}) == 3
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)


def test_uuid_changes_with_the_users_pass() -> None:
    uuids = {TWCompilePass(before=before).uuid() for before in (None, Recorder(b"a"), Recorder(b"b"))}
    assert len(uuids) == 3 and None not in uuids


@pytest.mark.parametrize("before", [Recorder(None), lambda graph: None])
def test_no_uuid_when_the_users_pass_has_none(before: Callable[[fx.Graph], object]) -> None:
    assert TWCompilePass(before=before).uuid() is None
