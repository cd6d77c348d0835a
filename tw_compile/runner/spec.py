"""What a run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from tw_compile.config import Config
from tw_compile.kernels.collective.wires import EXACT

DTYPES = ("bfloat16", "float16", "float32")
MODES = ("default", "reduce-overhead")


@dataclass(frozen=True)
class RunSpec:
    """One run; plain values, so that it can be handed to another process.

    Attributes:
        model: A preset, a ``config.json`` or a checkpoint folder, see :func:`tw_compile.models.config.load_config`.
        world_size: Tensor-parallel ranks.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL).
        tokens: Prompt lengths; every one is compiled and checked on its own.
        dtype: Of weights and activations.
        layers: Keep only this many layers; None keeps all.
        transport: See :class:`tw_compile.Config`.
        mode: torch.compile's mode, for both models.
        split: See :class:`tw_compile.Config`; so is ``device_profile``.
        wire: See :class:`tw_compile.Config`; so are ``wire_sites`` and ``wire_min_bytes``.
        trace: Where the ranks write the traces of one forward, see :func:`tw_compile.runner.timeline.trace_of_rank`.
        timeout: Seconds after which the run, or one collective of it, has failed.
    """

    model: str
    world_size: int
    device: str
    tokens: tuple[int, ...]
    dtype: str
    layers: int | None = None
    transport: str = "auto"
    mode: str = "default"
    timeout: float = 1800.0
    split: str = "auto"
    device_profile: str = "auto"
    trace: str | None = None
    wire: str = EXACT
    wire_sites: str = "all"
    wire_min_bytes: int | None = None

    @property
    def compiles(self) -> int:
        """How many models are compiled: on a CPU the unfused one for the first prompt length only."""
        return len(self.tokens) + (len(self.tokens) if self.device == "cuda" else 1)

    @property
    def steps(self) -> int:
        """How many progress messages a run sends; on GPUs every compiled model is timed, too."""
        others = 7  # starting, importing, building, float64, eager, starting the compiler, comparing
        return (
            others
            + self.compiles * (2 if self.device == "cuda" else 1)
            + (self.trace is not None)
            + (self.wire != EXACT)
        )

    @property
    def config(self) -> Config:
        """The options of the passes."""
        return Config(
            transport=self.transport,
            split=self.split,
            device_profile=self.device_profile,
            wire=self.wire,
            wire_sites=self.wire_sites,
            wire_min_bytes=self.wire_min_bytes,
        )
