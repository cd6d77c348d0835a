"""Define a pass: a step with a name, the passes that it needs, and a report of what it did.

    def _count(graph, context):
        return Outcome(changed=False, counts={"mm": sum(is_call(node, aten.mm.default) for node in graph.nodes)})

    register(Pass("count_mm", _count), after="fuse_all_reduce_rms_norm")

The manager (``manager.py``) runs passes in order, times them, dumps graphs around them, and undoes those that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

import torch.fx as fx

from tw_compile.config import Config
from tw_compile.gating import Gate
from tw_compile.passes.reasons import HostAttention, SplitRefused
from tw_compile.planning import FLASH3, DeviceProfile, Link

P = ParamSpec("P")
T = TypeVar("T")

TokenRange = tuple[int, int | None]
"""The smallest and the largest token count (inclusive; None: unbounded)."""


class InductorNeed(StrEnum):
    """What Inductor must do with a graph that a pass has changed. The caller of the passes arranges this, not a pass."""

    NO_COMBO_KERNELS = "no_combo_kernels"
    """Inductor must not combine independent kernels: in a split graph it would combine kernels of both halves."""
    TUNE_FOR_EXAMPLES = "tune_for_examples"
    """Inductor must tune kernels whose sizes operators compute for the example values that came with these sizes."""


@dataclass(frozen=True)
class HostGraph:
    """What a host says about a graph that it compiles.

    ``counts`` are the smallest and the largest number of tokens (None: unbounded) with which the host runs the graph. The
    tokens are dim 0 of the graph's inputs. The host launches steps of more than ``captured_tokens`` tokens kernel by kernel;
    this takes ``host_us`` for a split layer. If attention is outside of the graph, ``attention_kernel`` is the name of its
    kernel in device profiles. ``refused``: why the host's graph must not be split; None if nothing is known against it.
    ``measures``: the host compiles the graph split and whole, and measures which is faster. So where no plan can be made, it is
    split in equal halves.
    """

    counts: TokenRange
    attention: HostAttention = HostAttention.ELSEWHERE
    host_us: float = 0.0
    captured_tokens: int = 0
    attention_kernel: str = FLASH3
    refused: SplitRefused | None = None
    measures: bool = False

    def launch_us(self, tokens: int) -> float:
        return 0.0 if tokens <= self.captured_tokens else self.host_us

    @property
    def is_piece(self) -> bool:
        """Whether the graph begins behind an attention operator and ends before one."""
        return self.attention is HostAttention.ELSEWHERE


@dataclass(frozen=True)
class Outcome:
    """What a pass did to one graph.

    Attributes:
        changed: Whether the pass changed the graph. If so, later passes compute analyses of the graph again.
        counts: What the pass counts, by name.
        refused: Why the pass does not do its work on this graph; empty if it does. Passes that need it do not run.
    """

    changed: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    refused: str = ""


class Context:
    """What passes may read besides the graph, and what they hand to each other, during one run over one graph.

    Attributes:
        config: The options.
        gate: Decides which sizes are fused.
        profile: The profile of the device that the planner plans for; None if no profile is known.
        host: What the graph's host says about the graph; None for torch.compile.
        link: What the planner knows of the link that messages take where GPUs have no peer access; None if nothing is planned.
        prefetch_bytes: How much of the next weights a call may bring into the L2 cache; 0: nothing.
    """

    def __init__(
        self,
        config: Config,
        gate: Gate,
        profile: DeviceProfile | None = None,
        host: HostGraph | None = None,
        link: Link | None = None,
        prefetch_bytes: int = 0,
    ) -> None:
        self.config = config
        self.gate = gate
        self.profile = profile
        self.host = host
        self.link = link
        self.prefetch_bytes = prefetch_bytes
        self._analysed: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        self._kept: dict[type, Any] = {}

    @property
    def tokens(self) -> TokenRange | None:
        """The token counts that the host runs the graph with, where it knows better than the graph's symbols do."""
        return None if self.host is None else self.host.counts

    def analysis(self, analyse: Callable[P, T], *operands: P.args, **options: P.kwargs) -> T:
        """``analyse(*operands, **options)``, computed once for the same objects, until a pass changes the graph.

        ``analyse`` must depend on these objects alone, and must change nothing. Callers must not change its result.
        """
        key = (analyse, *map(id, operands), *sorted(options.items()))
        if key not in self._analysed:
            # The operands are kept alive, so that no other object gets their ids.
            self._analysed[key] = analyse(*operands, **options), operands
        known: T = self._analysed[key][0]
        return known

    def forget(self, but: tuple[Callable[..., Any], ...]) -> None:
        """Drop all analyses ``but`` these. The manager calls this when a pass has changed the graph."""
        self._analysed = {key: known for key, known in self._analysed.items() if key[0] in but}

    def keep(self, value: object) -> None:
        """Hand ``value`` to later passes and to the report, which ask for it by its class (:meth:`kept`)."""
        self._kept[type(value)] = value

    def kept(self, kind: type[T]) -> T | None:
        """The value of class ``kind`` that an earlier pass has kept; None if there is none."""
        return self._kept.get(kind)

    def needed(self, kind: type[T]) -> T:
        """The value of class ``kind``, which an earlier pass must have kept.

        Raises:
            LookupError: No pass has kept one, so the order of the passes is wrong.
        """
        value = self.kept(kind)
        if value is None:
            raise LookupError(f"context: expected a {kind.__name__} from an earlier pass, got none")
        return value


@dataclass(frozen=True)
class Pass:
    """One step of the order.

    Attributes:
        name: What reports, dumps and ``tw_compile.disable_passes`` call it.
        run: Does the work. If it raises, the manager undoes this pass and the rest of its transaction, and runs no later pass.
        transaction: Neighbouring passes of the same transaction are kept or undone together. Empty: the pass stands alone.
        needs: Passes that this pass needs. If one of them did not run to its end, this pass does not run.
        indispensable: Why the transaction is wrong, or worse than nothing, without this pass; empty if it is not. If an
            indispensable pass is switched off, its whole transaction is switched off.
        look: Returns the outcome, without an edit, if there is nothing to change; returns None if ``run`` must be called. The
            manager does not copy a graph that a pass only looks at: copying takes longer than many a pass does.
        edits: Whether the pass may change the graph at all.
        rolls_back: Whether ``run`` itself restores the graph before it raises; such a pass stands alone. For all other passes
            the manager keeps a copy of the graph.
        keeps: Analyses (:meth:`Context.analysis`) that are still right for the changed graph.
        inductor: What Inductor must do with a graph that this pass has changed.
    """

    name: str
    run: Callable[[fx.Graph, Context], Outcome]
    transaction: str = ""
    needs: tuple[str, ...] = ()
    indispensable: str = ""
    look: Callable[[fx.Graph, Context], Outcome | None] | None = None
    edits: bool = True
    rolls_back: bool = False
    keeps: tuple[Callable[..., Any], ...] = ()
    inductor: tuple[InductorNeed, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"name: expected an identifier, got {self.name!r}")
        if not callable(self.run):
            raise TypeError(f"run: expected a function of a graph and a context, got {self.run!r}")
        if self.rolls_back and self.transaction:
            raise ValueError(f"rolls_back: expected a pass without a transaction, got one of {self.transaction!r}")
