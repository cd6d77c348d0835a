"""The only package that touches private torch APIs.

Each entry says what differs between the torch versions that are supported (2.11 to 2.15); ``tests/unit/test_compat.py``
has a test per difference.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.distributed.distributed_c10d import _resolve_process_group

from tw_compile.compat.fake_tensors import copy_dynamo_marks as copy_dynamo_marks
from tw_compile.compat.fake_tensors import fake_like as fake_like
from tw_compile.compat.fake_tensors import is_plain_fake as is_plain_fake
from tw_compile.compat.fake_tensors import size_keys as size_keys
from tw_compile.compat.fake_tensors import symbols_of as symbols_of
from tw_compile.compat.generated_code import compile_post_grad as compile_post_grad
from tw_compile.compat.generated_code import inductor_code as inductor_code
from tw_compile.compat.graph_cache import compile_settings as compile_settings
from tw_compile.compat.graph_cache import graph_cache_folder as graph_cache_folder
from tw_compile.compat.lowering import lower_as_calls as lower_as_calls
from tw_compile.compat.new_sizes import example_of as example_of
from tw_compile.compat.new_sizes import new_size as new_size
from tw_compile.compat.new_sizes import tune_for_examples as tune_for_examples

if TYPE_CHECKING:
    from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
    from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true

_OF_COMPILING = {
    "BackendCompilerFailed": "torch._dynamo.exc",
    "CustomGraphPass": "torch._inductor.custom_graph_pass",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "ShapeEnv": "torch.fx.experimental.symbolic_shapes",
    "statically_known_true": "torch.fx.experimental.symbolic_shapes",
}
"""Names that are imported when they are asked for. Importing Dynamo and Inductor takes seconds, and code that only asks about a
machine needs neither."""


def __getattr__(name: str) -> Any:
    if name not in _OF_COMPILING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(_OF_COMPILING[name]), name)
    return found


def operators_are_watched() -> bool:
    """Whether a mode sees the operators that are called now, as torch's own does in the first call of compiled code.

    That one compares what custom operators return with what they were given.
    """
    return torch._C._len_torch_dispatch_stack() > 0


POST_GRAD_HOOK = "post_grad_custom_post_pass"
"""Inductor's option for a pass over the functional graph, right before its own last passes."""


def mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor options that a ``mode`` of torch.compile stands for."""
    from torch._inductor import list_mode_options

    return {} if mode in (None, "default") else list_mode_options(mode)


def cuda_graph_options() -> dict[str, Any]:
    """The options of mode "reduce-overhead", but a GPU graph that can't be captured is an error, not a warning."""
    return {**mode_options("reduce-overhead"), "triton.cudagraph_or_error": True}


def inductor_option_names() -> set[str]:
    from torch._inductor import config

    return set(config.get_config_copy())


def global_post_grad_pass() -> Any:
    """The pass that the user has put into Inductor's global configuration; the object itself, not a copy."""
    from torch._inductor import config

    return getattr(config, POST_GRAD_HOOK)


def compile_with_inductor(gm: fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile as backend="inductor" does, with ``options`` in force for this graph and its lazily compiled parts."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs, config_patches=options)  # type: ignore[return-value]


group_resolvers: list[Callable[[str], dist.ProcessGroup | None]] = []


def add_group_resolver(resolver: Callable[[str], dist.ProcessGroup | None]) -> None:
    """Make a host's own names of groups known. ``resolver`` returns None for names that are not the host's."""
    if resolver not in group_resolvers:
        group_resolvers.append(resolver)


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group registered under ``name`` (the string that collectives carry), or that a host calls by this name."""
    group = _hosts_group(name)
    return _resolve_process_group(name) if group is None else group  # type: ignore[arg-type]


def _hosts_group(name: str) -> dist.ProcessGroup | None:
    for resolver in group_resolvers:
        group = resolver(name)
        if group is not None:
            return group
    return None


def group_name(group: dist.ProcessGroup) -> str:
    return group.group_name


def all_gather(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[world_size * rows, ...]`` from every rank's ``[rows, ...]``, in rank order.

    Torch's gloo (2.11 to 2.14) keeps the name of the work that completed last. Its two threads write it without a lock. A name
    of 16 characters or more has memory of its own, so two works that complete at once corrupt the heap, and the process dies
    later. Functional ``all_gather_into_tensor`` makes such a work, ALLGATHER_COALESCED. With ``out`` it is ALLGATHER.
    """
    collectives = torch.ops._c10d_functional
    size, name = group.size(), group_name(group)
    gathered = shard.new_empty((size * len(shard), *shard.shape[1:]))
    return collectives.wait_tensor.default(
        collectives.all_gather_into_tensor_out.default(shard, size, name, out=gathered)
    )


def default_store() -> dist.Store:
    """The key-value store that the ranks of the default process group met at."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def process_group_facts() -> list[tuple[str, int, int]]:
    """``(name, world_size, hosts)`` of every process group. A rewrite depends on them as well as on the graph."""
    from torch.distributed import distributed_c10d

    if not dist.is_available() or not dist.is_initialized():
        return []
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    facts = []
    for group, name in distributed_c10d._world.pg_names.items():
        ranks = dist.get_process_group_ranks(group)
        facts.append((name, len(ranks), len({rank // local_world_size for rank in ranks})))
    return sorted(facts)


def chain_passes(hook: Any) -> Callable[[fx.Graph], object] | None:
    """The value of Inductor's custom pass option as one pass. It may be None, a callable, or (from 2.14) a list of them."""
    from tw_compile.compat.pass_sequence import PassSequence

    if hook is None or not isinstance(hook, list | tuple):
        return hook
    return PassSequence(list(hook)) if hook else None


def emulates_precision_casts() -> bool:
    """Whether Inductor keeps the rounding of casts down and up again inside fused code; by default it does not."""
    from torch._inductor import config

    return bool(config.emulate_precision_casts)


def tunes_gemms() -> bool:
    """Whether Inductor chooses between the library's GEMM and templates of its own by timing them."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


class SmCarveout:
    """In this context cuBLASLt plans matmuls for all but ``reserved`` SMs.

    Eager launches come through here. So this is a class, not a generator, and does not use
    ``torch.backends.cuda.preferred_blas_library``.
    """

    def __init__(self, reserved: int) -> None:
        self._reserved = reserved

    def __enter__(self) -> None:
        self._library = torch._C._get_blas_preferred_backend()
        self._before = torch._C._get_sm_carveout_experimental()
        torch._C._set_blas_preferred_backend(torch._C._BlasBackend.Cublaslt)
        torch._C._set_sm_carveout_experimental(self._reserved)

    def __exit__(self, *_: object) -> None:
        torch._C._set_sm_carveout_experimental(self._before)
        torch._C._set_blas_preferred_backend(self._library)


_streams: dict[tuple[int | None, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream(device)`` of a device with an index, without a new object for each call."""
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def one_shot_all_reduce_bytes() -> int:
    """The largest message, in bytes, that Inductor lowers to a one-shot all_reduce over symmetric memory.

    By default this is 0, because Inductor lowers none. This function imports Inductor, which takes seconds.
    """
    from torch._inductor import config

    return config._collective.one_shot_all_reduce_threshold_bytes if config._collective.auto_select else 0


def size_bounds(size: int | torch.SymInt) -> tuple[int, int | None]:
    """The smallest and the largest value that a size of a graph may have; None when nothing bounds it."""
    if isinstance(size, int):
        return size, size
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return int(bounds.lower), int(bounds.upper) if bounds.upper.is_Integer else None  # else one of two infinities


def keep_within(size: torch.SymInt, low: int, high: int | None) -> None:
    """Make the graph that is compiled now one for ``low`` to ``high``, where ``size`` is; None: for any more than ``low``.

    These are guards: torch.compile compiles another graph when another size comes.
    """
    if not (size >= low and (high is None or size <= high)):
        raise ValueError(f"size: expected {low} to {high}, got {size}")


def can_keep_within(size: torch.SymInt) -> bool:
    """Whether :func:`keep_within` can hold for a size: it has a value in this call, and another graph is compiled for others.

    AOTInductor compiles once. A user may have put another value in the place of this call's (``hint_override``).
    """
    from torch._inductor.virtualized import V

    replaced = getattr(size.node.shape_env, "var_to_hint_override", {})
    own = size.node.has_hint() and replaced.keys().isdisjoint(size.node.expr.free_symbols)
    return own and not V.aot_compilation


def known_factor(size: torch.SymInt) -> int:
    """The largest known number that a size is a multiple of, as its expression shows: 2 for ``2 * s0 - 2 * u0``."""
    return int(size.node.expr.as_content_primitive()[0])


def leave_out_combo_kernels() -> None:
    """Keep the compilation in progress from putting kernels that don't depend on each other into one ("combo kernels").

    They would join kernels of both halves. Inductor may also time them first, which needs a number for each size. For sizes of
    :func:`new_size`, 2.11 has no number and raises TypeError. An option of a compilation ends with the compilation; only a
    value that a user has put into the global configuration would stay changed.
    """
    from torch._inductor import config

    config.combo_kernels = False


def bind_new_sizes(node: fx.Node) -> None:
    """Note on a node which sizes of :func:`new_size` it introduces; Inductor defines them there."""
    from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings

    environment = graph_fake_mode(node.graph).shape_env
    node.meta["unbacked_bindings"] = compute_unbacked_bindings(environment, node.meta["val"]) or {}


def is_symbol(size: int | torch.SymInt) -> bool:
    """Whether a size is one symbol, and not computed from others."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_symbol)


def is_training_graph() -> bool:
    """Whether the graph being compiled is a training forward or backward graph.

    Reads what AOTAutograd leaves on the tracing context: ``is_train`` up to 2.13, and in all versions the name of the graph.
    Outside of a compile the answer is False.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return False
    names = context.aot_graph_name or []
    named = any(str(name).endswith(("_forward", "_backward", "_joint")) for name in names)
    return named or bool(getattr(context.fw_metadata, "is_train", False))


def graph_fake_mode(graph: fx.Graph) -> Any:
    """The FakeTensorMode that made the metadata of ``graph``, or None when no node carries a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones included, as long as both are alive."""
    return tensor.untyped_storage()._cdata


def is_higher_order(target: Any) -> bool:
    """Whether a node's target takes functions or graphs, and so has no schema that says what it writes."""
    from torch._ops import HigherOrderOperator

    return isinstance(target, HigherOrderOperator)


def leaves_autocast(node: fx.Node) -> bool:
    """Whether a node of Dynamo's ends a region of ``torch.autocast``."""
    return node.target is torch.amp.autocast_mode._exit_autocast


def order_after(graph: fx.Graph, after: dict[fx.Node, list[fx.Node]]) -> None:
    """Make Inductor run each node after the tensors that ``after`` gives for it, though it doesn't read them.

    Each node is replaced by a call of the operator ``control_deps``, whose subgraph is the node. The graph must belong to a
    module. Only nodes with kernels of their own can be ordered in this way: a pointwise operator has no kernel yet when
    Inductor looks for it. On 2.11 Inductor ignores a dependence on an operator without a result, or on a tuple.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(tensors) for node, tensors in after.items()})


def sort_nodes(graph: fx.Graph) -> None:
    """Move nodes that stand before their operands behind them. All others keep their order."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace (``TORCH_TRACE``), which tlparse shows as a file of that name.

    Without a trace this costs nothing: ``text`` is not called.
    """
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


@contextlib.contextmanager
def tracing_fake_mode(fake_mode: Any) -> Iterator[None]:
    """Run operators on fake tensors of ``fake_mode``; with None the tensors at hand are used as they are."""
    if fake_mode is None:
        yield
        return
    with fake_mode:
        yield


@contextlib.contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of ``world_size`` ranks in this one process; collectives move no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("fake_process_group: a default process group exists already; destroy it first")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_mode_active() -> bool:
    """Whether a FakeTensorMode is on, so that new tensors have no storage."""
    from torch._guards import active_fake_mode

    return active_fake_mode() is not None


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """A context in which an outer FakeTensorMode is off."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@contextlib.contextmanager
def fold_constants_on_cpu() -> Iterator[None]:
    """Let Inductor's folding of uniform constants, which computes single elements for real, do so on the CPU."""

    from torch._inductor.fx_passes import joint_graph
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def moved(value: Any) -> Any:
                return torch.device("cpu") if isinstance(value, torch.device) else value

            return func(*tree_map(moved, args), **tree_map(moved, kwargs or {}))

    fold = joint_graph.UniformValueConstantFolder._deduce_value

    def deduce_value(folder: Any, node: fx.Node) -> Any:
        with OnCpu():
            return fold(folder, node)

    with mock.patch.object(joint_graph.UniformValueConstantFolder, "_deduce_value", deduce_value):
        yield


def symm_mem_empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised ``uint8 [nbytes]`` that other processes can map. Local; raises where it is not supported."""
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem.empty(nbytes, dtype=torch.uint8, device=device)


def load_symm_mem_operators() -> None:
    """Load the GEMMs of ``torch.ops.symm_mem`` that communicate. They are defined in Python."""
    import torch.distributed._symmetric_memory  # noqa: F401


def symm_mem_rendezvous(tensor: torch.Tensor, group_name: str) -> tuple[Any, list[int], int, int]:
    """Map every rank's ``tensor`` (from :func:`symm_mem_empty`) into this process; collective over the group.

    Returns the handle (keep it: it owns the mappings), the address of each rank's tensor, the multicast address of all of
    them (0 when there is none), and the tensor's offset within its allocation. The offset must be the same on all ranks,
    otherwise the addresses are wrong: ``buffer_ptrs`` and ``multicast_ptr`` are the bases of the allocations. Older versions
    have no ``offset`` on the handle, so the offset is taken from the local addresses.
    """
    import torch.distributed._symmetric_memory as symm_mem

    group = _hosts_group(group_name)
    handle = symm_mem.rendezvous(tensor, group_name if group is None else group.group_name)  # type: ignore[arg-type]
    offset = tensor.data_ptr() - handle.buffer_ptrs[handle.rank]
    multicast = handle.multicast_ptr + offset if handle.multicast_ptr else 0
    return handle, [base + offset for base in handle.buffer_ptrs], multicast, offset


def delay_stream(cycles: int) -> None:
    """Keep the current CUDA stream busy for ``cycles`` of the GPU's clock, while the host goes on."""
    torch.cuda._sleep(cycles)


_CUDNN_MAX_HEAD_DIM = 128


@contextlib.contextmanager
def trace_fused_attention(cudnn: bool = False) -> Iterator[None]:
    """Trace half-precision attention on (fake) CUDA tensors to the flash kernel, or with a mask to the efficient one.

    Without a GPU torch picks the decomposition into matmuls and a softmax. On a GPU it picks a fused kernel: one of these, or
    cuDNN's. ``cudnn``: trace to cuDNN's kernel in place of the flash kernel, as on GPUs where torch prefers it.
    """
    aten = torch.ops.aten
    operator = aten.scaled_dot_product_attention.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def attention(
        query: torch.Tensor,
        keys: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        same_width = query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
        fused = query.device.type == "cuda" and is_half and same_width
        if fused and attn_mask is None and cudnn and query.shape[-1] <= _CUDNN_MAX_HEAD_DIM:
            return aten._scaled_dot_product_cudnn_attention.default(
                query, keys, value, None, False, dropout_p, is_causal, scale=scale
            )[0]
        if fused and attn_mask is None:
            outputs = aten._scaled_dot_product_flash_attention.default(
                query, keys, value, dropout_p, is_causal, scale=scale
            )
            return outputs[0]
        if fused and attn_mask is not None and query.shape[1] == keys.shape[1]:
            if attn_mask.dtype == torch.bool:
                seen, hidden = (query.new_full((), number) for number in (0.0, -math.inf))
                attn_mask = torch.where(attn_mask, seen, hidden)
            count = attn_mask.shape[-1]
            padded = torch.nn.functional.pad(attn_mask, (0, -count % 16))  # the kernel wants rows of 32 bytes
            bias = padded[..., :count].expand(*query.shape[:2], -1, -1)
            return aten._scaled_dot_product_efficient_attention.default(
                query, keys, value, bias, False, dropout_p, is_causal, scale=scale
            )[0]
        return operator._op_dk(
            key, query, keys, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    operator.py_impl(key)(attention)
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        del operator.py_kernels[key]
        operator._dispatch_cache.clear()


@contextlib.contextmanager
def cold_compile(cache_folder: Any | None) -> Iterator[None]:
    """Compile as if for the first time: Dynamo and in-memory caches empty, FX graph caches off, kernels in ``cache_folder``.

    With ``cache_folder`` None, kernels are in their usual folder. Processes that give the same folder build each kernel once.
    C++ headers are the machine's.
    """
    from unittest import mock

    from torch._inductor import config
    from torch._inductor.utils import clear_caches

    folders: dict[str, str] = {}
    if cache_folder is not None:
        folders["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder)
        folders["TRITON_CACHE_DIR"] = os.path.join(cache_folder, "triton")
    torch._dynamo.reset()
    clear_caches()
    try:
        with mock.patch.dict(os.environ, folders), config.patch(force_disable_caches=True):
            yield
    finally:
        torch._dynamo.reset()
        clear_caches()


@contextlib.contextmanager
def without_graph_cache() -> Iterator[None]:
    """Don't look up whole graphs in AOTAutograd's cache: computing the key of a large one takes seconds."""
    from torch._functorch import config

    with config.patch(enable_autograd_cache=False):
        yield


def write_plain_cpp() -> None:
    """Have Inductor's C++ in this process use no vector instructions, unless the environment says something about them.

    Such code compiles faster, and Inductor starts no process to try each kind of vector instructions. This is for ranks that
    show what is computed.
    """
    from torch._inductor import config

    if config.cpp.vec_isa_ok is None:
        config.cpp.vec_isa_ok = False


def functorch_config(settings: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """A context with the options of AOTAutograd in ``settings``, which were saved with the code that it compiled."""
    from torch._functorch import config

    return config.patch(settings)


def multicast_support(device_index: int) -> bool | None:
    """Whether torch says that a GPU has NVLink multicast; None when this build can't tell. Creates nothing.

    ``TORCH_SYMM_MEM_DISABLE_MULTICAST=1`` makes torch leave multicast unused. If it is set, the answer is False, whatever this
    build of torch does with the variable here.
    """
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
        return False
    from torch._C import _distributed_c10d

    symmetric_memory = getattr(_distributed_c10d, "_SymmetricMemory", None)
    query = getattr(symmetric_memory, "has_multicast_support", None)
    if query is None:
        return None
    from torch._C._autograd import DeviceType

    return bool(query(DeviceType.CUDA, device_index))
