"""Compute what operators return for fake tensors, and run each operator once for all calls of one form.

The layers of a model have calls that differ only in which tensors they read. Running an operator on fake tensors takes longer
than all other work of adding its call to a graph. So only the first of several calls of one form runs. The other calls get new
tensors with the metadata of its results.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from tw_compile import compat

_CONSTANTS = frozenset(
    (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class _Result(NamedTuple):
    """A tensor that a call has returned. ``inside`` is the place of the operand whose memory it uses; None: its own memory."""

    tensor: torch.Tensor
    inside: int | None


class FakeResults:
    """Runs operators on fake tensors of ``fake_mode``.

    For other tensors, or without a ``fake_mode`` (None: the graph's own tensors are used), no result is used again.
    """

    def __init__(self, fake_mode: Any) -> None:
        self._fake_mode = fake_mode
        self._known: dict[object, Any] = {}

    def compute(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``target`` returns for the fake results of the nodes among its arguments."""
        fakes, named = fx.map_arg((args, dict(kwargs)), lambda node: node.meta["val"])
        if target is operator.getitem:
            return fakes[0][fakes[1]]
        if not isinstance(target, compat.OpOverload):
            return self._run(target, fakes, named)
        operands: list[torch.Tensor] = []
        form = target, self._form(fakes, operands), self._form(named, operands)
        if form in self._known:
            return _like(self._known[form], operands)
        returned = self._run(target, fakes, named)
        if self._is_of_form(returned, operands):
            self._known[form] = _described(returned, operands)
        return returned

    def _run(self, target: Any, fakes: Any, named: Any) -> Any:
        with compat.tracing_fake_mode(self._fake_mode):
            return target(*fakes, **named)

    def _form(self, argument: Any, operands: list[torch.Tensor]) -> object:
        """A key that is equal for arguments for which an operator returns the same metadata.

        Where this is not known, the key equals no other key. The tensors among the arguments are appended to ``operands``.
        """
        kind = type(argument)
        if kind in _CONSTANTS:
            return kind, argument
        if compat.is_plain_fake(argument, self._fake_mode):
            operands.append(argument)
            return argument.dtype, argument.device, argument.dim(), compat.size_keys(_sizes(argument))
        if isinstance(argument, torch.SymInt):
            return kind, compat.size_keys((argument,))
        if isinstance(argument, list | tuple):
            return kind, tuple([self._form(one, operands) for one in argument])
        if isinstance(argument, dict):
            return tuple(argument), tuple([self._form(one, operands) for one in argument.values()])
        return object()

    def _is_of_form(self, returned: Any, operands: list[torch.Tensor]) -> bool:
        """Whether the metadata of the results follows from the form of the call.

        It does not if a result is an operand itself, if the operator introduces symbolic sizes, or if a result's memory belongs
        to several results or to several operands.
        """
        tensors = _tensors(returned)
        if not all(compat.is_plain_fake(tensor, self._fake_mode) for tensor in tensors):
            return False
        known = compat.symbols_of(size for operand in operands for size in _sizes(operand))
        if not compat.symbols_of(size for tensor in tensors for size in _sizes(tensor)) <= known:
            return False
        memories = list(map(compat.storage_key, tensors))
        of_operands = list(map(compat.storage_key, operands))
        alone = all(memories.count(memory) == 1 and of_operands.count(memory) <= 1 for memory in memories)
        return alone and not any(tensor is operand for tensor in tensors for operand in operands)


def _sizes(tensor: torch.Tensor) -> tuple[int | torch.SymInt, ...]:
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())


def _tensors(returned: Any) -> tuple[Any, ...]:
    if isinstance(returned, list | tuple):
        return tuple(returned)
    return () if returned is None else (returned,)


def _described(returned: Any, operands: list[torch.Tensor]) -> Any:
    """``returned``, with a :class:`_Result` in the place of each tensor."""
    places = {compat.storage_key(operand): place for place, operand in enumerate(operands)}
    results = [_Result(tensor, places.get(compat.storage_key(tensor))) for tensor in _tensors(returned)]
    if isinstance(returned, list | tuple):
        return type(returned)(results)
    return results[0] if results else None


def _like(known: Any, operands: list[torch.Tensor]) -> Any:
    """What a call with ``operands`` returns, derived from what a call of the same form has returned (``known``)."""
    if known is None:
        return None
    if isinstance(known, _Result):
        return compat.fake_like(known.tensor, None if known.inside is None else operands[known.inside])
    return type(known)([_like(one, operands) for one in known])
