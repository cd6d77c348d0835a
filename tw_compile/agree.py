"""Agreement between ranks, of the two kinds that there are.

Through the store (:func:`first_value`, :func:`agreed`): all ranks take the value of the rank that came first. No rank waits for
the others, so ranks need not ask equally often; compiler caches, for one, are each rank's own.

No rank has to come for that. Where all must, :func:`all_come` says whether they do, and waits no longer than it is told to.

By a collective (:func:`gather`, :func:`common_obstacle`): all ranks hear what all have to say, and do the same about it. Every
rank must call, and all wait for the last one.
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
"""By key the process group in which a value was agreed on, and the value."""


def first_value(own: T, store: dist.Store, key: str) -> T:
    """The value of the rank that came here first with ``key``."""
    text = base64.b64encode(pickle.dumps(own)).decode()
    value: T = pickle.loads(base64.b64decode(store.compare_set(f"tw_compile/{key}", "", text)))
    return value


def agreed(key: str, own_value: Callable[[], T], agree: Callable[[T, dist.Store, str], T] = first_value) -> T:
    """One value for all ranks of the default process group, agreed on once per group and key.

    Where there is no group, or a fake one, nobody is there to agree with, and the value is this process's own.

    Args:
        own_value: What this rank would say; asked for only where the value is not known yet.
        agree: Makes the common value of own value, store and key, and says what there is to say about a difference.
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
    """Agree anew on all values, as a new process does."""
    _values.clear()


def all_come(store: dist.Store, key: str, ranks: int, seconds: float) -> bool:
    """Whether all ``ranks`` call this with ``key`` before one of them has waited ``seconds``; the same on all ranks.

    A rank that comes later hears what those that waited heard, and does not wait.
    """
    verdict = f"{key}/all"
    if store.add(f"tw_compile/{key}/came", 1) == ranks:
        return first_value(True, store, verdict)
    try:
        store.wait([f"tw_compile/{verdict}"], timedelta(seconds=seconds))
    except RuntimeError:  # nobody has said anything yet; of two ranks that say so now the store takes the first
        return first_value(False, store, verdict)
    return first_value(False, store, verdict)


def refuse(store: dist.Store, key: str) -> None:
    """Instead of :func:`all_come`, by a rank that will not come: those that wait need not."""
    first_value(False, store, f"{key}/all")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ``value`` of every rank of ``group``, None being the default group, by rank. Collective."""
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
