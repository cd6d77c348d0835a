"""A Llama of vLLM's with two adapters of random weights in all of its layers, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

ENGINE = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
_NAMES = ("lora_expand", "lora_shrink", "LoRAKernelMeta")


@contextmanager
def punica() -> Iterator[None]:
    """What vLLM's kernels for adapters compute, written anew. vLLM keeps them from machines on which Triton has no driver."""
    import vllm.lora.ops.triton_ops as kernels
    from vllm.lora.punica_wrapper import punica_gpu

    with torch.library._scoped_library("vllm", "FRAGMENT") as library:
        library.impl("lora_shrink", _shrink, "CPU")
        library.impl("lora_expand", _expand, "CPU")
        given = {name: getattr(kernels, name) for name in _NAMES}
        with (
            mock.patch.multiple(punica_gpu, create=True, **given),
            mock.patch("vllm.utils.torch_utils.PIN_MEMORY", False),
        ):
            yield


def adapted(vllm_config: Any, prefix: str) -> Any:
    """For ``fake_vllm.decoder``: a Llama in which both adapters are loaded."""
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.models.llama import LlamaForCausalLM

    model = LlamaForCausalLM(vllm_config=vllm_config, prefix="")
    scheduler, lora = vllm_config.scheduler_config, vllm_config.lora_config
    sizes = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, model.config.vocab_size
    manager = LoRAModelManager(model, *sizes, lora, torch.device("cpu"), vllm_config)
    manager.lora_index_to_id = [1, 2]
    generator = torch.Generator().manual_seed(7)
    for name, layer in manager.modules.items():
        if "embed_tokens" in name or name.startswith("model.layers"):
            for one in _matrices(layer):
                one.copy_(0.3 * torch.randn(one.shape, generator=generator))
    return model


def _matrices(layer: Any) -> list[torch.Tensor]:
    found = (layer.lora_a_stacked, layer.lora_b_stacked)
    return [one for many in found for one in ([many] if isinstance(many, torch.Tensor) else many)]


def step_of(adapters: list[int]) -> Callable[[Any], dict[str, Any]]:
    """A step whose token ``i`` has the adapter ``adapters[i]``: 1, 2, or 0 for none."""

    def prepare(model: Any) -> dict[str, Any]:
        from vllm.lora.layers import LoRAMapping

        model.lora_manager.set_adapter_mapping(LoRAMapping(tuple(adapters), (0,), is_prefill=True))
        return {"attn_metadata": None}

    return prepare


def _rows_by_adapter(order: torch.Tensor, counts: Any, starts: Any, ids: Any, none: Any, active: Any) -> Any:
    """Each adapter's number, with the rows that have it."""
    for place in range(0 if bool(none) else int(active)):
        if int(ids[place]) >= 0:
            yield int(ids[place]), order[int(starts[place]) : int(starts[place] + counts[place])].long()


def _shrink(rows: Any, a: Any, output: torch.Tensor, mapping: Any, *sorted_tokens_and_scale: Any) -> None:
    *sorted_tokens, scale = sorted_tokens_and_scale
    output.zero_()
    for adapter, numbers in _rows_by_adapter(*sorted_tokens):
        for part, matrix in enumerate(a):
            output[part, numbers] = rows[numbers].float() @ matrix[adapter].squeeze(0).float().T * scale


def _expand(
    buffer: Any, b: Any, output: torch.Tensor, mapping: Any, order: Any, counts: Any, starts: Any, ids: Any, none: Any,
    active: Any, offset_start: int = 0, add_inputs: bool = False,
) -> None:  # fmt: skip
    assert output.is_contiguous() and mapping.shape == order.shape == buffer.shape[1:2]
    for adapter, numbers in _rows_by_adapter(order, counts, starts, ids, none, active):
        begin = offset_start
        for part, matrix in enumerate(b):
            one = matrix[adapter].squeeze(0).float()
            made = buffer[part, numbers, : one.shape[1]].float() @ one.T
            columns = slice(begin, begin + one.shape[0])
            output[numbers, columns] = made.to(output.dtype) + (output[numbers, columns] if add_inputs else 0)
            begin += one.shape[0]
