"""Options of the passes: one frozen, validated value."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tw_compile import environment
from tw_compile.gating.facts import BACKENDS
from tw_compile.gating.hosts import DEFAULT_HOST, host_names
from tw_compile.kernels.collective.transports import AUTO, TRANSPORTS
from tw_compile.kernels.collective.wires import EXACT

OPTION_PREFIX = "tw_compile."
WIRE_CHOICES = (EXACT, "int8", "int6", "auto")
WIRE_SITES = ("all", "attention", "mlp")
WHY_NOT_INT4 = (
    f"expected one of {', '.join(WIRE_CHOICES)}, got 'int4', which gathers normalised rows in 4 bits and so breaks models; "
    "int6 is the narrowest"
)
_MOST_DIGITS = 9
_ABSORB_MM = ("auto", "always", "never")
_FEED_MM = ("auto", "always", "never")
_AUTO_OR_OFF = ("off", "auto")
_SPLIT_GEMM_SMS = ("auto", "off")
_PREFETCH = ("auto", "off")
_CALIBRATE = ("auto", "stored", "off")
JOIN_GEMMS = "join_gemms"
"""The name of the pass that joins GEMMs that read the same input into one GEMM."""
_SWITCHES = ("fuse", "disable_custom_all_reduce", "strict")


def whole_number(text: str) -> int | None:
    """The number that up to nine digits give; None for other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


@dataclass(frozen=True)
class Config:
    """What the passes may do. Every field can be given to torch.compile as ``options={"tw_compile.<field>": value}``.

    Attributes:
        fuse: Fuse all_reduce + residual add + RMSNorm.
        transport: ``auto`` takes the best transport for the device and the group. ``p2p``, ``host``, ``nccl`` and ``gloo``
            insist on that transport; sites that it can't serve are refused. ``multimem`` is ``p2p`` with NVLink multicast,
            where torch's symmetric memory has it.
        fuse_min_bytes: Messages smaller than this stay as they are (decision ``gated``).
        fuse_max_bytes: Messages larger than this stay as they are; None means no limit.
        absorb_mm: Whether the fused operator does the matmul whose result is summed, if that is a plain ``mm``. The matmul then
            writes its result to where the other ranks read it. ``auto``: with transports that have such memory (``p2p`` and
            ``multimem``), and unless Inductor tunes matmuls (``max_autotune``, ``max_autotune_gemm``). ``always`` and
            ``never`` depend on neither condition.
        feed_mm: Whether the GEMMs that read a fused norm's result (q, k and v; gate and up) begin with the rows that their
            rank has, and take the other ranks' rows as they arrive: ``auto``, ``always`` or ``never``. ``auto``: where that
            is proven to be right, in graphs that are not split, over ``p2p`` between two Hopper GPUs, and with tokens enough
            (:class:`tw_compile.passes.reasons.FeedRefusal` names what keeps a site from being fed). With fewer tokens GEMMs
            would wait for rows longer than the call gains. ``always``: with any number of tokens and ranks, to compare.
        thresholds: The tables that say at which sizes fusing pays: ``auto`` takes the shipped tables and the user's, ``off``
            fuses all sizes, else a TOML file that takes precedence over these tables (``tw_compile.gating``). Unused where
            ``transport`` insists on a transport.
        calibrate: Whether ranks measure a node that nobody has measured. They do so once, before they compile the first graph
            with an all_reduce over all of them; in vLLM, when the workers have loaded the model. ``auto`` measures, on GPUs.
            ``stored`` uses only what ``tw-compile tune --quick`` or another process has measured, ``off`` no calibration. A
            :class:`tw_compile.TWCompilePass` by itself never measures.
        host: Whose all_reduce the fused operator is compared with: ``pytorch``, or another of
            :func:`tw_compile.gating.host_names`.
        all_reduce_backend: ``auto`` follows the host's dispatch; else the backend of an unfused all_reduce, such as
            ``multimem``.
        disable_custom_all_reduce: Whether a host that has its own all_reduce does not use it, as by its setting of this name.
        split: Whether the tokens of a graph are split into two halves: ``auto`` (where the planner says that it is faster),
            ``off``, or the number of tokens in the first half, as ``512`` or ``"512"``, which are the same.
        split_gemm_sms: Whether GEMMs beside communication are planned for the SMs that are left: ``auto`` (where the plan says
            so) or ``off``.
        vllm_layer_groups: For vLLM only, in steps too long for vLLM's CUDA graphs: the largest number of layers that are
            compiled as one graph, with attention in it, instead of pieces that end at attention. 0 keeps the pieces.
        vllm_step_graphs: For vLLM only: whether steps of some numbers of tokens are captured as CUDA graphs at the start, with
            attention, where a step is measured to gain by it: ``auto`` or ``off``. It needs FlashAttention 3, graphs that vLLM
            captures itself, and 1 GiB of free memory.
        vllm_sharded_residual: For vLLM only, in steps that run by pieces that end at attention: whether a piece hands the next
            one a residual of which each rank has its own rows, ``auto``, or always all rows, ``off``. It needs an engine that
            captures steps with prompts in CUDA graphs, as a host that launches pieces has two more operators in each layer.
        device_profile: The device that splits are planned for: ``auto`` takes the profile of the present device, else a name or
            a TOML file (``tw_compile.planning``), whatever the device and the transport are.
        wire: How rows travel between ranks: ``exact``, in codes of 8 bits (``int8``), or sums in 4 and results in
            8 bits (``int6``). Codes change numbers, so they are used only on request. ``auto`` is ``int8`` where a measured
            table says that it is faster, and ``wire_accuracy`` says that it does not cost this checkpoint too much.
        wire_sites: The sums that ``wire`` applies to: ``all``, those behind ``attention`` (o_proj), or those of the ``mlp``
            (down_proj).
        wire_min_bytes: Smaller messages travel as they are. None: the tables decide; where they have no entry, the transport
            decides (1 MiB over NCCL, gloo and host memory, never over ``p2p``), but ``wire`` = ``auto`` is then exact.
        wire_accuracy: The file in which ``tw-compile tune --wire int8 --checkpoint NAME`` has kept what wires cost this
            checkpoint; None: nothing was measured. ``wire`` = ``auto`` takes a wire only where its cost is within the budget.
        prefetch: How many bytes of the next matmul's weights a fused call of up to 64 tokens brings into the L2 cache while
            its message is under way: a number, as ``8388608`` or ``"8388608"``, ``off``, or ``auto``: the number in the
            device's profile. Among the shipped profiles only H100's has one. Results are the same to the bit.
        disable_passes: Names of passes that are switched off: a list, or a text with commas.
            :class:`tw_compile.TWCompilePass` refuses names that no pass has. If the token split would be wrong without one of
            these passes, the whole split is switched off.
        strict: An internal error raises. Otherwise the failed transaction is undone, with a warning (environment:
            ``TW_COMPILE_STRICT=1``).

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    fuse: bool = True
    transport: str = "auto"
    fuse_min_bytes: int = 0
    fuse_max_bytes: int | None = None
    absorb_mm: str = "auto"
    feed_mm: str = "auto"
    thresholds: str = "auto"
    calibrate: str = "auto"
    host: str = DEFAULT_HOST
    all_reduce_backend: str = "auto"
    disable_custom_all_reduce: bool = False
    split: str = "auto"
    split_gemm_sms: str = "auto"
    vllm_layer_groups: int = 1
    vllm_step_graphs: str = "auto"
    vllm_sharded_residual: str = "auto"
    device_profile: str = "auto"
    wire: str = EXACT
    wire_sites: str = "all"
    wire_min_bytes: int | None = None
    wire_accuracy: str | None = None
    prefetch: str = "auto"
    disable_passes: tuple[str, ...] = ()
    strict: bool = dataclasses.field(default_factory=environment.strict)

    def __new__(cls, *values: Any, **named: Any) -> Config:
        try:
            _check_names(named)
        except ValueError as error:
            raise TypeError(str(error)) from None
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            self._check_type(name, bool, "True or False")
        self._check_choice("transport", (AUTO, *sorted(TRANSPORTS.names())))
        self._check_choice("absorb_mm", _ABSORB_MM)
        self._check_choice("feed_mm", _FEED_MM)
        self._check_choice("split_gemm_sms", _SPLIT_GEMM_SMS)
        self._check_choice("calibrate", _CALIBRATE)
        self._check_choice("host", host_names())
        self._check_choice("all_reduce_backend", ("auto", *BACKENDS))
        self._check_type("thresholds", str, "auto, off or a file")
        self._check_type("device_profile", str, "auto, the name of a profile or a TOML file")
        self._check_wire()
        self._check_choice("wire_sites", WIRE_SITES)
        if self.wire_min_bytes is not None:
            self._check_count("wire_min_bytes", "bytes")
        if self.wire_accuracy is not None:
            self._check_type("wire_accuracy", str, "a file")
        self._check_split()
        self._check_prefetch()
        self._check_passes()
        self._check_count("vllm_layer_groups", "layers")
        self._check_choice("vllm_step_graphs", _AUTO_OR_OFF)
        self._check_choice("vllm_sharded_residual", _AUTO_OR_OFF)
        self._check_count("fuse_min_bytes", "bytes")
        if self.fuse_max_bytes is not None:
            self._check_count("fuse_max_bytes", "bytes")
            if self.fuse_max_bytes < self.fuse_min_bytes:
                raise ValueError(
                    f"{OPTION_PREFIX}fuse_max_bytes: expected at least fuse_min_bytes ({self.fuse_min_bytes}), "
                    f"got {self.fuse_max_bytes}"
                )

    def _check_type(self, name: str, expected: type, wording: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, expected):
            raise TypeError(f"{OPTION_PREFIX}{name}: expected {wording}, got {value!r}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        wording = f"one of {', '.join(choices)}"
        self._check_type(name, str, wording)
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{OPTION_PREFIX}{name}: expected {wording}, got {value!r}")

    def _check_wire(self) -> None:
        if self.wire == "int4":
            raise ValueError(f"{OPTION_PREFIX}wire: {WHY_NOT_INT4}")
        self._check_choice("wire", WIRE_CHOICES)

    def _check_split(self) -> None:
        wording = "off, auto or a number of tokens as '512'"
        if type(self.split) is int:  # options come untyped; as text, equal values have one spelling and one digest
            object.__setattr__(self, "split", str(self.split))
        self._check_type("split", str, wording)
        if self.split not in ("off", "auto") and self.split_tokens is None:
            raise ValueError(f"{OPTION_PREFIX}split: expected {wording}, got {self.split!r}")

    def _check_prefetch(self) -> None:
        wording = "off, auto or a number of bytes as '8388608'"
        if type(self.prefetch) is int:
            object.__setattr__(self, "prefetch", str(self.prefetch))
        self._check_type("prefetch", str, wording)
        if self.prefetch not in _PREFETCH and not whole_number(self.prefetch):
            raise ValueError(f"{OPTION_PREFIX}prefetch: expected {wording}, got {self.prefetch!r}")

    def _check_passes(self) -> None:
        value: Any = self.disable_passes
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",") if name.strip()]
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            wording = "names of passes, as 'narrow_residuals,reserve_sms'"
            raise TypeError(f"{OPTION_PREFIX}disable_passes: expected {wording}, got {value!r}")
        object.__setattr__(self, "disable_passes", tuple(dict.fromkeys(value)))

    @property
    def joins_gemms(self) -> bool:
        """Whether GEMMs that read the same input may be joined into one where nothing is split; the planner must know this."""
        return JOIN_GEMMS not in self.disable_passes

    @property
    def split_tokens(self) -> int | None:
        """The tokens of half 1 that ``split`` asks for; None where it names no number."""
        return whole_number(self.split) or None

    @property
    def prefetch_bytes(self) -> int:
        """The bytes that ``prefetch`` asks for; 0 where it names no number."""
        return whole_number(self.prefetch) or 0

    def _check_count(self, name: str, unit: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{OPTION_PREFIX}{name}: expected a number of {unit}, got {value!r}")
        if value < 0:
            raise ValueError(f"{OPTION_PREFIX}{name}: expected 0 {unit} or more, got {value}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Build from plain keys, e.g. ``{"transport": "p2p"}``.

        Raises:
            ValueError: A key is unknown; the message names it and the nearest known one.
        """
        _check_names(values)
        return cls(**values)

    @classmethod
    def split_options(cls, options: Mapping[str, Any] | None) -> tuple[Config, dict[str, Any]]:
        """Take the ``tw_compile.*`` keys out of torch.compile's options; what is left belongs to Inductor."""
        ours: dict[str, Any] = {}
        inductor: dict[str, Any] = {}
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options: expected a dictionary, got {options!r}")
        for key, value in (options or {}).items():
            if not isinstance(key, str):
                raise TypeError(f"options: expected names as keys, got {key!r}")
            if key.startswith(OPTION_PREFIX):
                ours[key.removeprefix(OPTION_PREFIX)] = value
            else:
                inductor[key] = value
        return cls.from_mapping(ours), inductor

    def as_options(self) -> dict[str, Any]:
        """The same configuration as torch.compile options."""
        return {OPTION_PREFIX + f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def digest(self) -> str:
        """A hash that changes exactly when a field changes; part of the compile caches' key."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def _check_names(values: Iterable[str]) -> None:
    known = [field.name for field in dataclasses.fields(Config)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {OPTION_PREFIX}{near[0]}?" if near else ""
            raise ValueError(f"unknown option {OPTION_PREFIX}{key}: expected one of {', '.join(known)}{hint}")
