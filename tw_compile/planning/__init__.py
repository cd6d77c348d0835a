"""Which tokens of a layer to split off, and what each overlap window runs with. Pure arithmetic: imports no torch."""

from __future__ import annotations

from tw_compile.planning.communication import RowShares
from tw_compile.planning.device import DeviceProfile, load_profile, profile_names, profile_of_device
from tw_compile.planning.evidence import Evidence
from tw_compile.planning.gemm import Gemm
from tw_compile.planning.layer import FLASH3, Attention, LayerShape, layer_shape, masked_kernel
from tw_compile.planning.links import Link
from tw_compile.planning.plan import Mode, Off, Plan, evidence, plan_layer
from tw_compile.planning.windows import ALL_EXACT, GemmPlan, PlannedWindow, Wires

__all__ = [
    "ALL_EXACT",
    "FLASH3",
    "Attention",
    "DeviceProfile",
    "Evidence",
    "Gemm",
    "GemmPlan",
    "LayerShape",
    "Link",
    "Mode",
    "Off",
    "Plan",
    "PlannedWindow",
    "RowShares",
    "Wires",
    "evidence",
    "layer_shape",
    "load_profile",
    "masked_kernel",
    "plan_layer",
    "profile_names",
    "profile_of_device",
]
