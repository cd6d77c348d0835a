"""What a pass is: a step with a name, what it needs, and what it says of what it did.

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
from tw_compile.passes.reasons import HostAttention
from tw_compile.planning import FLASH3, DeviceProfile, Link

P = ParamSpec("P")
T = TypeVar("T")

TokenRange = tuple[int, int | None]
"""The smallest and the largest token count (inclusive; None: unbounded)."""


class InductorNeed(StrEnum):
    """What Inductor must do with a graph that a pass has changed. Whoever called the passes sees to it, no pass does."""

    NO_COMBO_KERNELS = "no_combo_kernels"
    """Kernels that do not depend on each other stay apart: of a split graph they would be those of both halves."""
    TUNE_FOR_EXAMPLES = "tune_for_examples"
    """Kernels with sizes that operators compute are tuned for the examples that came with these sizes."""


@dataclass(frozen=True)
class HostGraph:
    """What a host says of a graph that it compiles.

    ``counts`` are the smallest and the largest number of tokens (None: unbounded) that it runs it with, dim 0 of its inputs.
    Steps of more than ``captured_tokens`` tokens are launched kernel by kernel, which takes ``host_us`` for a split layer.
    ``attention_kernel`` is what device profiles call the kernel of attention that is elsewhere.
    """

    counts: TokenRange
    attention: HostAttention = HostAttention.ELSEWHERE
    host_us: float = 0.0
    captured_tokens: int = 0
    attention_kernel: str = FLASH3

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
        changed: Whether the graph is another one than before. What was analysed of it is then computed anew.
        counts: What the pass counts, by name.
        refused: Why the pass does not do its work on this graph; empty if it does. Passes that need it do not run.
    """

    changed: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    refused: str = ""


class Context:
    """What passes may know beside the graph, and what they leave for each other; of one run over one graph.

    Attributes:
        config: The options.
        gate: Decides which sizes are fused.
        profile: The device that is planned for; None where none is known.
        host: What the graph's host says of it; None for torch.compile.
        link: What messages travel over where GPUs have no peer access, as it is planned for; None where nothing is planned.
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

        ``analyse`` must depend on these alone, and change nothing; nor may a caller change what it returns.
        """
        key = (analyse, *map(id, operands), *sorted(options.items()))
        if key not in self._analysed:
            self._analysed[key] = analyse(*operands, **options), operands  # which thereby keep their identity
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
        run: Does the work. An exception undoes it, and whatever else its transaction has done, and no pass runs behind it.
        transaction: Passes next to each other with the same one are kept or undone together. Empty: it stands alone.
        needs: Passes without which it does not run: they were refused, or are switched off.
        indispensable: Whether the transaction is wrong, or worse than nothing, without it; why, in words. If such a pass is
            switched off, all of its transaction is.
        look: Says, without an edit, what the outcome is if there is nothing to change; None if ``run`` is to be called. A graph
            that a pass only looks at is not copied, which would take longer than most passes do.
        edits: Whether it may change the graph at all.
        rolls_back: Whether the graph is as it was when ``run`` raises, by itself; such a pass stands alone. For all others the
            manager keeps a copy.
        keeps: Analyses (:meth:`Context.analysis`) that are right for the changed graph, too.
        inductor: What a graph that it has changed needs.
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
