"""One test per difference between torch versions that compat handles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch._inductor import config as inductor_config

from tw_compile import compat
from tw_compile.testing import fake_process_group


class Named(compat.CustomGraphPass):
    def __init__(self, name: str | None, log: list[str]) -> None:
        self.name, self.log = name, log

    def __call__(self, graph: fx.Graph) -> None:
        self.log.append(str(self.name))

    def uuid(self) -> Any:
        return self.name


@pytest.mark.parametrize("mode", [None, "default"])
def test_default_mode_has_no_options(mode: str | None) -> None:
    assert compat.mode_options(mode) == {}
    assert compat.mode_options("reduce-overhead")["triton.cudagraphs"] is True


@pytest.mark.parametrize(("before", "after"), [(None, False), (True, True), (False, False)])
def test_plain_cpp_is_written_unless_the_environment_says_otherwise(before: bool | None, after: bool) -> None:
    with inductor_config.patch({"cpp.vec_isa_ok": before}):
        compat.write_plain_cpp()
        assert inductor_config.cpp.vec_isa_ok is after


def test_what_is_set_are_options_of_inductor() -> None:
    assert {compat.POST_GRAD_HOOK, *compat.cuda_graph_options()} <= compat.inductor_option_names()
    assert compat.cuda_graph_options()["triton.cudagraphs"] is True


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_hook_without_a_pass(nothing: Any) -> None:
    assert compat.chain_passes(nothing) is None


def test_hook_with_one_pass_is_that_pass() -> None:
    one = Named("a", [])
    assert compat.chain_passes(one) is one


def test_hook_with_a_list_runs_them_in_order() -> None:
    log: list[str] = []
    chained = compat.chain_passes([Named("a", log), Named("b", log)])
    assert isinstance(chained, compat.CustomGraphPass) and chained.uuid() == ("a", "b")
    chained(fx.Graph())
    assert log == ["a", "b"]


@pytest.mark.parametrize("unknown", [Named(None, []), lambda graph: None])
def test_list_with_an_unidentified_pass_has_no_uuid(unknown: Any) -> None:
    chained = compat.chain_passes([Named("a", []), unknown])
    assert isinstance(chained, compat.CustomGraphPass) and chained.uuid() is None


def test_groups_are_known_by_name_size_and_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.process_group_facts() == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with fake_process_group(4):
        within, across = dist.new_group([0, 1]), dist.new_group([0, 2])
        facts = {name: rest for name, *rest in compat.process_group_facts()}
        assert facts[compat.group_name(dist.group.WORLD)] == [4, 2]
        assert facts[compat.group_name(within)] == [2, 1]
        assert facts[compat.group_name(across)] == [2, 2]
        assert compat.resolve_process_group(compat.group_name(within)) is within


def test_unknown_group_raises_what_the_finder_expects() -> None:
    with fake_process_group(2), pytest.raises((RuntimeError, ValueError, KeyError)):
        compat.resolve_process_group("nowhere")


@pytest.mark.parametrize(
    "options", [{"max_autotune": True}, {"max_autotune_gemm": True}, compat.mode_options("max-autotune")]
)
def test_gemms_are_tuned_on_request(options: dict[str, Any]) -> None:
    from torch._inductor import config

    assert not compat.tunes_gemms()
    with config.patch(options):
        assert compat.tunes_gemms()


def test_outside_of_a_compile_nothing_is_training() -> None:
    assert compat.is_training_graph() is False


def test_training_is_read_from_the_tracing_context() -> None:
    seen: list[bool] = []

    def compile_and_run(requires_grad: bool) -> None:
        def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
            return compat.compile_post_grad(
                gm, inputs, lambda graph: seen.append(compat.is_training_graph()), lambda _: None
            )

        torch._dynamo.reset()
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3, requires_grad=requires_grad))

    compile_and_run(False)
    compile_and_run(True)
    assert seen[0] is False and seen[1] is True


def test_fake_process_group_is_removed_even_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), fake_process_group(3):
        assert dist.get_world_size() == 3
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_fake_process_group_does_not_hide_a_real_one() -> None:
    with fake_process_group(2), pytest.raises(RuntimeError, match="exists already"), fake_process_group(2):
        pass


def test_fake_mode_of_a_graph() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph, mode = fx.Graph(), FakeTensorMode()
    node = graph.placeholder("x")
    assert compat.graph_fake_mode(graph) is None
    with mode:
        node.meta["val"] = torch.empty(2)
    assert compat.graph_fake_mode(graph) is mode


def test_placeholders_that_are_no_tensors_do_no_harm() -> None:
    """From 2.14 on meshes and specs of DTensors are placeholders."""
    from tw_compile import Config, TWCompilePass

    graph = fx.Graph()
    graph.placeholder("mesh").meta["val"] = object()
    graph.output([])
    TWCompilePass(Config(strict=True))(graph)


def test_generated_code_is_taken_and_patches_are_undone() -> None:
    from torch._inductor.graph import GraphLowering

    before = (torch.cuda.is_available, torch.cuda.current_device, GraphLowering.compile_to_module)
    with fake_process_group(2):
        from tw_compile.testing import generated_code

        code = generated_code(lambda x: x.sin() + 1, (torch.empty(8),), device="cuda")
    assert "triton" in code and "def call" in code
    assert (torch.cuda.is_available, torch.cuda.current_device, GraphLowering.compile_to_module) == before


@pytest.mark.parametrize(("multicast_base", "multicast"), [(0, 0), (1 << 40, (1 << 40) + 64)])
def test_rendezvous_adds_the_offset_within_the_allocation(
    monkeypatch: pytest.MonkeyPatch, multicast_base: int, multicast: int
) -> None:
    import torch.distributed._symmetric_memory as symm_mem

    tensor = torch.empty(8, dtype=torch.uint8)
    bases = [4096, tensor.data_ptr() - 64]
    handle = SimpleNamespace(rank=1, buffer_ptrs=bases, multicast_ptr=multicast_base)
    monkeypatch.setattr(symm_mem, "rendezvous", lambda *_: handle)
    found = compat.symm_mem_rendezvous(tensor, "g")
    assert found == (handle, [4096 + 64, tensor.data_ptr()], multicast, 64)


def test_a_hosts_name_of_a_group_means_that_group_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as symm_mem

    asked: list[str] = []

    def rendezvous(tensor: torch.Tensor, group: str) -> object:
        asked.append(group)
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr()], rank=0, multicast_ptr=0)

    monkeypatch.setattr(symm_mem, "rendezvous", rendezvous)
    monkeypatch.setattr(compat, "group_resolvers", [])
    with fake_process_group(2):
        within = dist.new_group([0, 1])
        compat.add_group_resolver(lambda name: within if name == "tp:0" else None)
        assert compat.resolve_process_group("tp:0") is within
        compat.symm_mem_rendezvous(torch.zeros(1), "tp:0")
        compat.symm_mem_rendezvous(torch.zeros(1), "other")
        assert asked == [compat.group_name(within), "other"]


def test_operators_of_the_first_call_of_compiled_code_are_watched() -> None:
    seen: list[bool] = []
    with torch.library._scoped_library("tw_compile_watched", "FRAGMENT") as library:
        library.define("noted(Tensor x) -> Tensor")
        library.impl("noted", lambda x: x + 1, "CPU")
        torch.library.register_fake("tw_compile_watched::noted", torch.empty_like, lib=library)
        noted = torch.ops.tw_compile_watched.noted.default

        def direct(x: torch.Tensor) -> torch.Tensor:
            seen.append(compat.operators_are_watched())
            return x + 1

        noted.direct = direct
        compat.lower_as_calls([noted])
        run = torch.compile(noted, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(run(torch.ones(4)), torch.full((4,), 2.0))
    assert seen == [True, False]


def test_nodes_before_their_operands_move_behind_them() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    negative = graph.call_function(torch.neg, (x,))
    total = graph.call_function(torch.add, (x, negative))
    graph.output(total)
    total.append(negative)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        graph.lint()
    compat.sort_nodes(graph)
    graph.lint()
    assert [node.name for node in graph.nodes] == ["x", "neg", "add", "output"]
