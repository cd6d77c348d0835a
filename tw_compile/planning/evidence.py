"""How far the planner is off on layers that were measured, and which margin follows for its gains.

The planner compares a split layer with the same layer unsplit, so an error that both predictions share changes nothing. What
counts is the error of their ratio. A split is taken if its predicted gain is above the margin. The margin is how much too
optimistic that ratio is on the device, on average. A layer whose prediction was too pessimistic counts as 0, because such an
error never makes a split slower than predicted. A larger margin would keep the slower way for no reason that was measured.

``configs/layers`` has the measured layers, one file for a kind of device. A device without any keeps ``UNMEASURED_MARGIN``.
A device whose profile is an estimate has the margin of :data:`ESTIMATES`, or else ``ESTIMATED_MARGIN``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

from tw_compile.planning.layer import LayerShape
from tw_compile.planning.presets import preset_layer

UNMEASURED_MARGIN = 0.05
"""The margin for a device without measured layers. No constant of a profile was fitted to the Qwen2.5-72B layers of
``configs/layers``. For them the planner was up to 4% too optimistic, with measured GEMMs. Estimates are no better than that."""

ESTIMATED_MARGIN = 0.10
"""The margin for a device whose profile is an estimate, where :data:`ESTIMATES` has nothing. It is above the largest error of
the estimates that could be checked, 6.7%. These were of compute capability 9.x, whose tiles, attention kernels, launches and
contention they have from H200. No layer was measured on another capability, so what an estimate is worth there is not known."""

_TIMES = ("unfused_us", "no_communication_us", "fused_us", "split_us")


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer that was measured unsplit and split in one run; times in microseconds, None where one was not measured.

    Attributes:
        group: Whether the ranks of a group added up. If not, one rank ran beside stand-ins for calls.
        first: Tokens of half 1.
        joined: Whether GEMMs of the unsplit layer may have been joined. They were not before 24 November 2026.
        source: Where the times come from.
    """

    model: str
    world_size: int
    tokens: int
    first: int
    group: bool
    joined: bool
    source: str
    split_us: float
    fused_us: float | None = None
    unfused_us: float | None = None
    no_communication_us: float | None = None

    @property
    def unsplit(self) -> str:
        """Which layer the split one is compared with, by the name of its time: the unfused one where nothing was fused."""
        return "unfused_us" if self.fused_us is None else "fused_us"

    @property
    def ratio(self) -> float:
        """Time of the split layer as a share of the unsplit one's."""
        return self.split_us / self.times[self.unsplit]

    @property
    def times(self) -> dict[str, float]:
        """The measured microseconds, by the names that predictions use for them."""
        return {name: us for name in _TIMES if (us := getattr(self, name)) is not None}

    @property
    def shape(self) -> LayerShape:
        layer = preset_layer(self.model, self.world_size)
        assert layer is not None, "measured layers are of shipped models"
        return layer[0]


@dataclass(frozen=True)
class LayerError:
    """Predictions beside one measured layer, as ``measured / predicted - 1``: above 0 the planner was too optimistic.

    Attributes:
        ratio: Error of the split layer's time as a share of the unsplit one's. That share decides whether to split.
        times: Errors of the times themselves, by the name of the variant.
    """

    layer: MeasuredLayer
    ratio: float
    times: dict[str, float]


@dataclass(frozen=True)
class CheckedEstimates:
    """How far estimated profiles were off on layers of a device that was taken for unknown.

    ``margin``, ``mean`` and ``worst`` are those of :class:`Evidence`, over ``layers`` layers of groups.
    """

    layers: int
    margin: float
    mean: float
    worst: float


ESTIMATES: Mapping[tuple[str, str, str], CheckedEstimates] = {
    ("sm90", "stream", ""): CheckedEstimates(21, 0.014, 0.001, 0.067),
    ("sm90", "host", "host-memory"): CheckedEstimates(7, 0.0, -0.090, -0.118),
}
"""By device class, kernel or transport, and link: estimates that two calibrations of H100 gave, with H100 taken for unknown.

The files are ``2026-11-25-2xh100-calibrated-choices.json`` and ``2026-11-26-4xh100-calibrated-tp4.json`` of
``benchmarks/results``. They are not installed, so the numbers are kept here, and ``test_planning_estimates.py`` computes them
again, with tiles of joint GEMMs as they were when the layers were measured. A layer counts with the calibration of as many
ranks as it has, which is what a node of that size would go by.
"""


@dataclass(frozen=True)
class Evidence:
    """The known errors of the planner for one device and kernel.

    ``errors``: one for each measured layer. ``estimated``: see :class:`~tw_compile.planning.device.DeviceProfile`.
    ``checked``: how far such estimates were off elsewhere, where that is known.
    """

    errors: tuple[LayerError, ...]
    estimated: bool = False
    checked: CheckedEstimates | None = None

    @property
    def counted(self) -> tuple[LayerError, ...]:
        """The errors that the margin is made from: those of groups, or of single ranks where no group was measured."""
        return tuple(error for error in self.errors if error.layer.group) or self.errors

    @property
    def margin(self) -> float:
        """The gain, as a share of the unsplit layer's time, from which on a split is taken."""
        if self.counted:
            return fmean(max(error.ratio, 0.0) for error in self.counted)
        if self.checked is not None:
            return self.checked.margin
        return ESTIMATED_MARGIN if self.estimated else UNMEASURED_MARGIN

    @property
    def mean(self) -> float:
        """The mean error with its sign; 0 without measured layers."""
        return fmean(error.ratio for error in self.counted) if self.counted else 0.0

    @property
    def worst(self) -> float:
        """The error that is furthest from 0, with its sign; 0 without measured layers."""
        return max((error.ratio for error in self.counted), key=abs, default=0.0)

    def __str__(self) -> str:
        rule = f"a split must be predicted to save more than {self.margin:.1%}"
        if self.checked is not None:
            return (
                f"{rule}. The profile is an estimate. On {self.checked.layers} layers of another device, which was taken for "
                f"unknown, such estimates were too optimistic by that much on average. The worst error was "
                f"{self.checked.worst:+.1%}; above 0 is too optimistic."
            )
        if not self.counted:
            what = "of the device little but calls, a GEMM and a norm was" if self.estimated else "no layer was"
            return f"{rule}, because {what} measured{'' if self.estimated else ' with this kernel on this device'}"
        what = "groups of GPUs" if self.counted[0].layer.group else "single GPUs, with stand-ins for calls,"
        return (
            f"{rule}. On {len(self.counted)} layers that were measured on {what} the prediction was too optimistic by "
            f"that much on average; where it was too pessimistic, that counts as 0. The mean of the errors with their "
            f"signs is {self.mean:+.1%}, the worst is {self.worst:+.1%}; above 0 is too optimistic."
        )


def measured_layers(device_name: str, kernel: str, link: str = "") -> Iterator[MeasuredLayer]:
    """The shipped measured layers of a device, with a fused kernel, or with a transport over a link of that name."""
    for values in _files():
        if device_name not in values["device_names"] or (values["kernel"], values.get("link", "")) != (kernel, link):
            continue
        for entry in values["layers"]:
            source = values["sources"][entry["source"]]
            about = {"model": entry["model"], "world_size": entry["world_size"], "source": source["text"]}
            for row in entry["rows"]:
                yield MeasuredLayer(
                    **about, group=source["calls"] == "group", joined=source.get("joined", False), **row
                )


@cache
def _files() -> tuple[dict[str, Any], ...]:
    folder = resources.files("tw_compile.configs") / "layers"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return tuple(tomllib.loads(file.read_text()) for file in files)
