"""Two ways in which ranks agree: through the store, and by a collective.

Through the store (:func:`first_value`, :func:`agreed`): all ranks take the value of the rank that came first. No rank waits for
the others, so ranks need not ask equally often. Compiler caches are one reason: each rank has its own.

This works even if some ranks never ask. Where all ranks must take part, :func:`all_come` says whether they do. It waits no
longer than the time it is given.

By a collective (:func:`gather`, :func:`common_obstacle`): every rank gets the values of all ranks, so all ranks can react in
the same way. Every rank must call, and all ranks wait for the last one.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from tw_compile import compat

T = TypeVar("T")

_values: dict[str, tuple[object, Any]] = {}
"""Maps a key to the process group that agreed on a value, and to the value."""


def first_value(own: T, store: dist.Store, key: str) -> T:
    """The value of the rank that came here first with ``key``."""
    text = base64.b64encode(pickle.dumps(own)).decode()
    value: T = pickle.loads(base64.b64decode(store.compare_set(f"tw_compile/{key}", "", text)))
    return value


def agreed(key: str, own_value: Callable[[], T], agree: Callable[[T, dist.Store, str], T] = first_value) -> T:
    """One value for all ranks of the default process group, agreed on once per group and key.

    Without a process group, or with a fake one, there are no other ranks. The value is then this process's own.

    Args:
        own_value: Computes the value that this rank proposes. It is called only where the value is not known yet.
        agree: Computes the common value from own value, store and key. It also reports a difference between the two values.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return own_value()
    world = dist.group.WORLD
    known = _values.get(key)
    if known is None or known[0] is not world:
        known = _values[key] = (world, agree(own_value(), compat.default_store(), key))
    value: T = known[1]
    return value


def forget() -> None:
    """Forget all values, so that ranks agree on them again as new processes do."""
    _values.clear()


def all_come(store: dist.Store, key: str, ranks: int, seconds: float) -> bool:
    """Whether all ``ranks`` call this with ``key`` before one of them has waited ``seconds``; the same on all ranks.

    A rank that calls after that gets the same answer as the ranks that waited, and does not wait.
    """
    verdict = f"{key}/all"
    if store.add(f"tw_compile/{key}/came", 1) == ranks:
        return first_value(True, store, verdict)
    try:
        store.wait([f"tw_compile/{verdict}"], timedelta(seconds=seconds))
    except RuntimeError:  # no verdict yet; if two ranks set one now, the store keeps the first
        return first_value(False, store, verdict)
    return first_value(False, store, verdict)


def refuse(store: dist.Store, key: str) -> None:
    """Say that this rank will not call :func:`all_come`, so that the ranks that wait there can stop waiting."""
    first_value(False, store, f"{key}/all")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ``value`` of every rank of ``group``, in rank order; None means the default group. Collective."""
    values: list[Any] = [None] * (dist.get_world_size() if group is None else group.size())
    dist.all_gather_object(values, value, group=group)
    return values


def first_obstacle(obstacles: Sequence[str | None]) -> str | None:
    """The first of the ranks' obstacles, with its rank; None when no rank has one."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(obstacles) if text is not None), None)


def common_obstacle(group: dist.ProcessGroup, obstacle: str | None, fact: object = None) -> str | None:
    """The first obstacle that any rank has, the same on all ranks; None when no rank has one and all facts are equal.

    Also a host barrier: no rank returns before every rank has called.
    """
    answers = gather((obstacle, fact), group)
    first = first_obstacle([reason for reason, _ in answers])
    if first is not None:
        return first
    for rank, (_, other) in enumerate(answers):
        if other != answers[0][1]:
            return f"ranks disagree: rank 0 has {answers[0][1]}, rank {rank} has {other}"
    return None
