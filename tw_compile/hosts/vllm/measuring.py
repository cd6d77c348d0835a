"""The workers of an engine measure a node that nobody measured, once: when the model is loaded, before memory is profiled.

vLLM compiles while it profiles. What a calibration would take then, vLLM would count as the model's. Before that, all ranks are
between the same two steps, and what a calibration leaves behind is counted as what it is.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from tw_compile.calibration import in_use
from tw_compile.config import Config
from tw_compile.environment import strict
from tw_compile.hosts.vllm.options import switched_off
from tw_compile.hosts.vllm.step_graphs import of_models
from tw_compile.hosts.vllm.ways import tried_ranges
from tw_compile.kernels.registry import load

logger = logging.getLogger("vllm.tw_compile")

_MEASURE = "tw_compile.tuning.calibrate:measure_or_use_stored"


def measure_behind_load_model() -> None:
    """Have :func:`measure` follow the loading of the model in each worker of this process.

    Executors call workers through ``WorkerWrapperBase``, which hands unknown methods on. So the method can be put there, and
    the module of the workers, which is slow to import, is left alone.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def load_model(self: Any, *args: Any, **named: Any) -> Any:
        tried_ranges.clear()  # a model that this process loaded before has nothing to do with this one
        of_models.clear()
        result = self.worker.load_model(*args, **named)
        measure(self.vllm_config)
        return result

    if not hasattr(WorkerWrapperBase, "load_model"):
        WorkerWrapperBase.load_model = load_model


def measure(engine: Any) -> None:
    """Measure this node with all ranks, or use what an earlier start has measured, if the passes are on in ``engine``.

    An error costs one line, and the engine goes on with the tables that are there.

    Raises:
        RuntimeError: A rank died, or did not answer, while all measured. With ``strict``, any error is raised.
    """
    config = _config_of(engine)
    if (
        config is None
        or not dist.is_initialized()
        or dist.get_world_size() != engine.parallel_config.tensor_parallel_size
    ):
        return
    try:
        load(_MEASURE)(config)
    except RuntimeError:
        raise
    except Exception as error:
        if config.strict or strict():
            raise
        logger.warning("tw_compile: this node is not measured: %s: %s", type(error).__name__, error)
    found = in_use()
    if found is not None and dist.get_rank() == 0:
        measuring, loading = found.seconds
        logger.info("tw_compile: this node was measured in %.1f s, after %.1f s of loading kernels", measuring, loading)


def _config_of(engine: Any) -> Config | None:
    """The configuration of the passes; None where they are off."""
    from vllm.platforms import current_platform

    inside = engine.compilation_config.inductor_compile_config.get(current_platform.pass_key)
    return None if switched_off(os.environ) else getattr(inside, "config", None)
