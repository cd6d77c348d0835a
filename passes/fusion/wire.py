"""How the rows of a fused call travel: exact, or in codes where option ``wire`` asks for them and the site allows it.

Where no wire was asked for, nothing is refused. Where one was, each site that keeps exact rows has a named reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tw_compile import compat
from tw_compile.config import Config
from tw_compile.gating import Gate
from tw_compile.gating.table import size
from tw_compile.gating.wire_accuracy import BUDGET_NATS
from tw_compile.kernels.collective.transports import TRANSPORTS, ExactHalves
from tw_compile.kernels.collective.wires import EXACT, WIRES
from tw_compile.passes.contract import TokenRange
from tw_compile.passes.fusion.feeds import feeds_of
from tw_compile.passes.fusion.find import FusionSite
from tw_compile.passes.reasons import WireRefusal, WireRefused

AUTO = "auto"
AUTO_WIRE = "int8"
"""The wire that ``auto`` takes, if a table says that it pays and a file says that it does not cost the checkpoint too much."""

_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WireDecision:
    """How rows travel (``wire``), and why not as asked (``refused``; None if as asked). ``feeds``: see :mod:`feeds`."""

    wire: str = EXACT
    refused: WireRefused | None = None
    feeds: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Threshold:
    """The message size in bytes from which on a wire is taken (None: it is never taken), and what says so (``why``)."""

    nbytes: int | None
    why: str


def name_of_wire(config: Config) -> str:
    """The wire that option ``wire`` means."""
    return AUTO_WIRE if config.wire == AUTO else config.wire


def wire_threshold(config: Config, gate: Gate, world_size: int, transport: str) -> Threshold:
    """From which size on the wire is taken: by the option, else by the tables, else by the transport."""
    name = name_of_wire(config)
    if config.wire_min_bytes is not None:
        return Threshold(config.wire_min_bytes, "tw_compile.wire_min_bytes")
    measured = gate.wire_entry(name, world_size=world_size, transport=transport)
    if measured is not None:
        table, entry = measured
        return Threshold(entry.from_bytes, f"{table.file}: {entry}; {entry.source}")
    fallback = TRANSPORTS[transport].wire_from_bytes
    if fallback is None or config.wire == AUTO:
        return Threshold(
            None,
            f"no table says from which size on {name} is faster over {transport} with {world_size} ranks; "
            "tw_compile.wire_min_bytes says it, too",
        )
    return Threshold(fallback, f"not measured: what {transport} has where no table says it")


def message_refusal(
    config: Config, gate: Gate, world_size: int, transport: str, hidden_size: int, dtype: torch.dtype, rows: TokenRange
) -> WireRefused | Threshold:
    """Why messages ``[rows, hidden_size]`` keep exact rows, whatever makes them; else the threshold that they reach.

    ``rows``: the smallest and the largest number of rows that one graph serves; None: unbounded.
    """
    name = name_of_wire(config)
    if name not in TRANSPORTS[transport].wires:
        return WireRefused(WireRefusal.TRANSPORT_WITHOUT_WIRE, f"{transport} moves rows as they are")
    group = WIRES[name].group
    if hidden_size % group:
        return WireRefused(
            WireRefusal.HIDDEN_NOT_IN_GROUPS,
            f"hidden size {hidden_size} is no multiple of {group}, the group of {name}",
        )
    if dtype not in _DTYPES:
        return WireRefused(WireRefusal.DTYPE_NOT_SUPPORTED, f"messages of {dtype}: who keeps 32 bits wants them")
    if compat.emulates_precision_casts():
        return WireRefused(
            WireRefusal.PRECISION_CASTS_KEPT, "emulate_precision_casts asks for every rounding as written"
        )
    threshold = wire_threshold(config, gate, world_size, transport)
    if threshold.nbytes is None:
        return WireRefused(WireRefusal.NOT_MEASURED, threshold.why)
    if config.wire == AUTO:
        costly = _accuracy_refusal(config, gate, world_size)
        if costly is not None:
            return costly
    row_bytes = hidden_size * dtype.itemsize
    smallest = rows[0] * row_bytes
    if smallest < threshold.nbytes:
        many = "" if rows[0] == rows[1] else "one graph for all token counts: the smallest has "
        return WireRefused(
            WireRefusal.MESSAGE_TOO_SMALL, f"{many}{size(smallest)} < {size(threshold.nbytes)} ({threshold.why})"
        )
    halves, largest = exact_halves(config, transport), None if rows[1] is None else rows[1] * row_bytes
    if halves is not None and (largest is None or largest >= halves.from_bytes):
        most = "messages of any size" if largest is None else size(largest)
        return WireRefused(
            WireRefusal.EXACT_HALVES_FASTER,
            f"{most}, and from {size(halves.from_bytes)} on halves with exact rows are faster than whole layers in "
            f"codes: {halves.why}; where nothing is split, tw_compile.split=off takes codes",
        )
    return threshold


def exact_halves(config: Config, transport: str) -> ExactHalves | None:
    """From which size on rows stay exact, as halves with exact rows are faster; None where codes have no such end.

    The passes decide about rows before they plan halves. So this is by size alone, wherever options let tokens be split.
    """
    by_hand = config.split == "off" or config.wire_min_bytes is not None
    return None if by_hand else TRANSPORTS[transport].exact_halves


def _accuracy_refusal(config: Config, gate: Gate, world_size: int) -> WireRefused | None:
    """Why ``auto`` keeps exact rows although a table says that codes are faster; None if it takes codes.

    Codes may cost the running checkpoint too much accuracy, or their cost may not be measured.
    """
    name, sites = name_of_wire(config), config.wire_sites
    cost = None if gate.accuracy is None else gate.accuracy.cost(name, world_size, sites)
    if cost is None:
        named = f"nothing in {config.wire_accuracy}" if config.wire_accuracy else "no file of tw_compile.wire_accuracy"
        return WireRefused(
            WireRefusal.ACCURACY_NOT_MEASURED,
            f"{named} says what {name} costs this checkpoint with {world_size} ranks, see tw-compile tune --checkpoint",
        )
    if not cost.within_budget:
        return WireRefused(
            WireRefusal.ACCURACY_BEYOND_BUDGET, f"{config.wire_accuracy}: {cost}, more than {BUDGET_NATS}"
        )
    return None


def decide_wire(
    site: FusionSite,
    config: Config,
    gate: Gate,
    world_size: int,
    transport: str,
    message: torch.Tensor,
    rows: TokenRange,
) -> WireDecision:
    """Decide how the rows of a site that is fused over ``transport`` travel.

    ``message`` is the site's fake partial sum, and ``rows`` says how many rows it may have.
    """
    if config.wire == EXACT:
        return WireDecision()
    kinds = feeds_of(site.partials())
    feeds = "+".join(sorted(kinds))
    refused: WireRefused | Threshold
    if config.wire_sites != "all" and kinds != {config.wire_sites}:
        made = feeds or "neither attention nor an MLP that is recognised"
        refused = WireRefused(
            WireRefusal.SITE_EXCLUDED, f"tw_compile.wire_sites is {config.wire_sites}, the sum is that of {made}"
        )
    else:
        hidden_size = int(message.shape[-1])
        refused = message_refusal(config, gate, world_size, transport, hidden_size, message.dtype, rows)
    if isinstance(refused, WireRefused):
        return WireDecision(EXACT, refused, feeds, f"not {name_of_wire(config)}: {refused.detail}")
    return WireDecision(name_of_wire(config), None, feeds, f"{name_of_wire(config)}: {refused.why}")
