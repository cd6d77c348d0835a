"""vLLM on a machine without a GPU: its own configuration, compiler and models, with a fake GPU, group and attention.

vLLM takes platforms from plugins, so the fake one is a plugin of a distribution in a temporary folder. Its CUDA extension needs
symbols of ``libcuda.so.1``, which a stub has; nothing calls them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 2
HIDDEN, LAYERS, MAX_TOKENS = 64, 3, 128
SCALE = 0.05
"""Of all weights and activations of a float8 model."""
_STUB = "\n".join(
    f"int {name}(void) {{ return 100; }}"
    for name in ("cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
)
_PLATFORM = """
def qualname():
    return "tw_fake_platform_class.FakeCuda"
"""
_PLATFORM_CLASS = """
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability


class FakeCuda(NonNvmlCudaPlatform):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id=0):
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 80 << 30

    @classmethod
    def get_device_communicator_cls(cls):
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
"""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
    "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
}  # fmt: skip


def obstacle() -> str | None:
    """Why these tests can't run here."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return "vLLM is not installed; CONTRIBUTING.md has the command that runs these tests"
    if torch.cuda.is_available():
        return "made for machines without a GPU"
    if shutil.which("cc") is None:
        return "needs a C compiler for the stub of libcuda.so.1"
    return None


def dispatch() -> str:
    """What is taken for the dispatch of the vLLM that is installed: 0.20, 0.24 or 0.33."""
    return "vllm-" + metadata.version("vllm").rpartition(".")[0]


def middle_pieces() -> int:
    """How many pieces between the first and the last one are compiled: equal ones once, but by 0.33 each.

    Not if ``VLLM_USE_MEGA_AOT_ARTIFACT`` is 0.
    """
    return LAYERS - 1 if dispatch() == "vllm-0.33" else 1


def prepare(folder: Path) -> None:
    """Make this process ready for ``import vllm``; files go to ``folder``."""
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(_STUB)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    (folder / "tw_fake_platform.py").write_text(_PLATFORM)
    (folder / "tw_fake_platform_class.py").write_text(_PLATFORM_CLASS)
    info = folder / "tw_fake_platform-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tw-fake-platform\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\ntw_fake = tw_fake_platform:qualname\n")
    sys.path.insert(0, str(folder))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    os.environ |= {
        "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "localhost", "MASTER_PORT": "29555",
    }  # fmt: skip


def engine_config(folder: Path, *, compilation: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A ``VllmConfig``, made as ``LLM(...)`` makes it."""
    from vllm.engine.arg_utils import EngineArgs

    given = {
        "model": str(folder / "model"), "skip_tokenizer_init": True, "max_model_len": MAX_TOKENS,
        "max_num_batched_tokens": MAX_TOKENS, "max_num_seqs": 8, "tensor_parallel_size": WORLD_SIZE,
        "distributed_executor_backend": "external_launcher", "load_format": "dummy",
        "compilation_config": {"cudagraph_mode": "NONE", **(compilation or {})},
    }  # fmt: skip
    return EngineArgs(**{**given, **arguments}).create_engine_config()


def make_groups(config: Any) -> None:
    """vLLM's groups over a fake process group, on which collectives move no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)
    parallel_state.in_the_same_node_as = lambda *args, **kwargs: [True] * WORLD_SIZE
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, backend=None, **rest: new_group(ranks, backend="fake")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(WORLD_SIZE, 0, "env://", 0, backend="fake")
        parallel_state.initialize_model_parallel(WORLD_SIZE, backend="fake")


def add_cpu_kernels() -> list[torch.library.Library]:
    """vLLM registers these for CUDA alone. A sum of one rank's summand and zeros is that summand.

    Attention of a step without metadata gives its query back; else the layer's implementation is called. Experts are something
    that is computed row by row, of what is routed, too.
    """
    import vllm.model_executor.layers.attention.attention  # these register them
    import vllm.model_executor.layers.attention.mla_attention
    import vllm.model_executor.layers.fused_moe  # noqa: F401

    library, extension = (torch.library.Library(name, "FRAGMENT") for name in ("vllm", "_C"))
    library.impl("all_reduce", lambda tensor, group_name: tensor.clone(), "CPU")
    library.impl("all_gather", _all_gather, "CPU")
    library.impl("unified_kv_cache_update", _update, "CPU")
    library.impl("unified_attention_with_output", _attention, "CPU")
    library.impl("moe_forward", _experts, "CPU")
    library.impl("moe_forward_shared", lambda *args: (_experts(*args), _experts(*args)), "CPU")
    library.impl("unified_mla_kv_cache_update", lambda key, *rest: key.new_empty(0), "CPU")
    library.impl("unified_mla_attention_with_output", _latent_attention, "CPU")
    if hasattr(torch.ops._C, "vocab_parallel_embedding"):  # since some version between 0.24 and 0.33
        extension.impl("vocab_parallel_embedding", _embedding, "CPU")
    return [library, extension]


def add_float8_cpu_kernels() -> torch.library.Library:
    """What vLLM's kernels of these names compute, written anew."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.impl("static_scaled_fp8_quant", _quantise, "CPU")
    library.impl("rms_norm_static_fp8_quant", _norm, "CPU")
    library.impl("fused_add_rms_norm_static_fp8_quant", _add_norm, "CPU")
    library.impl("dynamic_per_token_scaled_fp8_quant", _quantise_tokens, "CPU")
    library.impl("rms_norm_dynamic_per_token_quant", _norm_of_tokens, "CPU")
    library.impl("silu_and_mul_quant", _silu_and_mul, "CPU")
    library.impl("cutlass_scaled_mm", _scaled_mm, "CPU")
    return library


def _quantise(result: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, group_shape: Any = None) -> None:
    result.copy_((rows.float() * scale.reciprocal()).clamp(-448, 448))


def _quantise_tokens(result: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, upper_bound: Any = None) -> None:
    scale.copy_((rows.float().abs().amax(-1, keepdim=True) / 448).clamp_min(1 / (448 * 512)))
    result.copy_((rows.float() / scale).clamp(-448, 448))


def _norm_of_tokens(
    result: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    epsilon: float,
    upper_bound: Any = None,
    residual: torch.Tensor | None = None,
) -> None:
    rows = rows if residual is None else residual.add_(rows)
    y = rows.float() * torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + epsilon)
    _quantise_tokens(result, y.to(weight.dtype) * weight, scale)


def _silu_and_mul(result: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor) -> None:
    gate, up = rows.float().chunk(2, dim=-1)
    _quantise(result, (torch.nn.functional.silu(gate) * up).to(rows.dtype), scale)


def _norm(result: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, epsilon: float) -> None:
    y = rows.float() * torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + epsilon)
    _quantise(result, y.to(weight.dtype) * weight, scale)


def _add_norm(result: torch.Tensor, rows: torch.Tensor, residual: torch.Tensor, *rest: Any) -> None:
    _norm(result, residual.add_(rows), *rest)


def _scaled_mm(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, bias: Any = None
) -> None:
    out.copy_((a.float() @ b.float()) * a_scale * b_scale)


def _all_gather(tensor: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    """All ranks have what this one has."""
    return torch.cat([tensor] * world_size, dim)


def _embedding(result: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, start: int, end: int, *rest: int) -> None:
    own = (ids >= start) & (ids < end)
    result.copy_(weight[torch.where(own, ids - start, 0)] * own.unsqueeze(-1))


def _attention(query: torch.Tensor, key: Any, value: Any, output: torch.Tensor, *rest: Any, **more: Any) -> None:
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention.attention import unified_attention_with_output

    if get_forward_context().attn_metadata:
        unified_attention_with_output(query, key, value, output, *rest, **more)
    else:
        output.copy_(query.view(output.shape))


def _latent_attention(query: torch.Tensor, key: Any, rope: Any, output: torch.Tensor, *rest: Any, **more: Any) -> None:
    output.copy_(query.flatten(1)[:, : output.shape[1]])


def _experts(rows: torch.Tensor, routed: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.tanh(rows) * routed.float().softmax(1).amax(1, keepdim=True).to(rows.dtype)


def _update(key: torch.Tensor, value: torch.Tensor, layer_name: Any) -> torch.Tensor:
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention.attention import unified_kv_cache_update

    if get_forward_context().attn_metadata:
        return unified_kv_cache_update(key, value, layer_name)
    return key.new_empty(0)


@contextmanager
def llama(config: Any) -> Iterator[Any]:
    """:func:`decoder` of a Llama."""
    from vllm.model_executor.models.llama import LlamaModel

    with decoder(LlamaModel, config) as model:
        yield model


@contextmanager
def decoder(model_class: Any, config: Any) -> Iterator[Any]:
    """``model(tokens) -> hidden [tokens, hidden]``: a model of vLLM's, compiled as ``config`` says, always the same weights."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    default = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config), torch.device("cpu"):
            model = model_class(vllm_config=config, prefix="model")
            torch.manual_seed(0)
            for name, parameter in model.named_parameters():
                if "norm" in name or "scale" in name:
                    torch.nn.init.constant_(parameter, SCALE if "scale" in name else 1.0)
                else:
                    parameter.data.copy_(torch.randn(parameter.shape))
            for layer in model.modules():
                method = getattr(layer, "quant_method", None)
                if hasattr(method, "fp8_linear"):
                    method.process_weights_after_loading(layer)

        with torch.device("cpu"):  # as in vLLM, no configuration is current when the model runs

            def run(
                tokens: int, prepare: Callable[[Any], dict[str, Any]] | None = None, first: int = 0
            ) -> torch.Tensor:
                """``prepare`` makes a step of the model: fills its caches, and says what its context is.

                ``first`` is the first token, and its position.
                """
                positions = torch.arange(first, first + tokens)
                step = {"attn_metadata": None} if prepare is None else prepare(model)
                with torch.inference_mode(), set_forward_context(**step, vllm_config=config, num_tokens=tokens):
                    return model(positions % 128, positions, None)

            yield run
    finally:
        torch.set_default_dtype(default)
