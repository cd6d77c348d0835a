"""Which layers of a model stand for all of them: decoders repeat a few kinds of layers, in the same order, many times."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from transformers import AutoModel, PretrainedConfig

from tw_compile.compat import real_tensors
from tw_compile.models.config import keep_layers


@dataclass(frozen=True)
class Alike:
    """Layers that stand for all layers of a model.

    Attributes:
        layers: Indices into the model's layers, ascending; the first ones are ``0, 1, ...`` without a gap.
        stand_for: For each of ``layers``, in order, the layers of the model that are like it. Each layer of the model occurs
            once.
    """

    layers: tuple[int, ...]
    stand_for: tuple[tuple[int, ...], ...]


def alike_layers(config: PretrainedConfig) -> Alike:
    """The fewest layers from the front, and the end, that show every kind of layer between the same kinds of neighbours.

    What the passes do with a layer depends on the layer and its neighbours. So [A, A, A] shows [A, A, A, A], and [A, B, A, B]
    shows [A, B, A, B, A, B]. The result is all layers where a model of the fewest ones would not be built of the same layers.
    """
    total = config.num_hidden_layers
    built = _built(config)
    if built is None:
        return _all(total)
    values = [value for value in vars(config).values() if isinstance(value, list) and len(value) == total]
    found = choose([(layer, tuple(repr(value[index]) for value in values)) for index, layer in enumerate(built)])
    if len(found.layers) == total:
        return found
    return (
        found if _built(keep_layers(config, found.layers)) == [built[index] for index in found.layers] else _all(total)
    )


def choose(kinds: Sequence[Hashable]) -> Alike:
    """See :func:`alike_layers`. ``kinds``: the kinds of the layers, in order."""
    total = len(kinds)
    contexts = _contexts(kinds)
    inner = set(contexts[:-1])
    front = next(count for count in range(1, total + 1) if set(contexts[:count]) >= inner)
    # The end must continue the front as the model does: with the same kind of layer behind the same kind.
    ends = (
        end
        for end in range(total - 1, front, -1)
        if list(kinds[end - 1 : end + 1]) == list(kinds[front - 1 : front + 1])
    )
    layers = (*range(front), *range(next(ends, front), total))
    first: dict[Hashable, int] = {}
    for position, context in enumerate(_contexts([kinds[index] for index in layers])):
        first.setdefault(context, position)
    own = {index: position for position, index in enumerate(layers)}
    stand_for: list[list[int]] = [[] for _ in layers]
    for index, context in enumerate(contexts):
        stand_for[own[index] if index in own else first[context]].append(index)
    return Alike(layers, tuple(map(tuple, stand_for)))


def _contexts(kinds: Sequence[Hashable]) -> list[Hashable]:
    """Each kind with the kinds before and behind it; None before the first and behind the last."""
    before, behind = [None, *kinds[:-1]], [*kinds[1:], None]
    return list(zip(before, kinds, behind, strict=True))


def _all(total: int) -> Alike:
    return Alike(tuple(range(total)), tuple((index,) for index in range(total)))


def _built(config: PretrainedConfig) -> list[Hashable] | None:
    """What each layer is made of; None where the model's layers are not one list."""
    with real_tensors(), torch.device("meta"):
        model = AutoModel.from_config(config)
    total = config.num_hidden_layers
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList) and len(child) == total]
    return [tuple(map(_made_of, layer.named_modules())) for layer in lists[0]] if len(lists) == 1 else None


def _made_of(named: tuple[str, nn.Module]) -> Hashable:
    """Name, type, shapes of parameters, and plain attributes of a module, but not the number of its layer."""
    name, module = named
    shapes = tuple((key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False))
    plain = tuple(
        (key, value)
        for key, value in vars(module).items()
        if key != "layer_idx" and isinstance(value, int | float | str | None)
    )
    return name, type(module), shapes, plain
