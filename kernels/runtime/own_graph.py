"""A kernel that is launched as a CUDA graph of its own, for streams beside the stream on which all other work runs.

This avoids a slowdown on Hopper. Once a process has launched eight kernels directly on a second stream, the end of every kernel
takes some 0.35 us longer. This happens on all of its streams and in its graphs, also in graphs that were captured before.
Programmatic launches no longer overlap. Nothing was found that ends this state. Launches of graphs, events, and kernels that a
graph forks do not count towards the eight (measured with driver 580.159, see ``benchmarks/split-notes.md``; no documentation
says so). It matters because a decode step is hundreds of short kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any


class OwnGraph:
    """A graph of one kernel node, made in the current context.

    Each stream needs a graph of its own, because launches of the same graph never overlap.

    Args:
        call: Calls a function of the driver; raises if that fails.
        function: The kernel. It is launched as ``grid`` CTAs of ``block`` threads with ``shared_bytes`` of dynamic shared
            memory, in clusters of ``cluster`` CTAs.
        parameters: Address of an array with the address of the kernel's parameter, as ``cuLaunchKernel`` takes it.
    """

    def __init__(
        self,
        driver: Any,
        call: Callable[..., Any],
        function: Any,
        parameters: int,
        *,
        grid: int,
        block: int,
        shared_bytes: int,
        cluster: int,
    ) -> None:
        self._set_params, self._launch = driver.cuGraphExecKernelNodeSetParams, driver.cuGraphLaunch
        self._lock = Lock()
        self._params = params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = function
        params.gridDimX, params.gridDimY, params.gridDimZ = grid, 1, 1
        params.blockDimX, params.blockDimY, params.blockDimZ = block, 1, 1
        params.sharedMemBytes = shared_bytes
        params.kernelParams = parameters
        self._graph = call(driver.cuGraphCreate, 0)  # the graph owns the node, so keep it
        self._node = call(driver.cuGraphAddKernelNode, self._graph, None, 0, params)
        if cluster > 1:
            value = driver.CUkernelNodeAttrValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
            attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            call(driver.cuGraphKernelNodeSetAttribute, self._node, attribute, value)
        # Without flags the node has the priority of the stream that it is launched on.
        self._executable = call(driver.cuGraphInstantiate, self._graph, 0)

    def launch(self, parameters: int, stream: int) -> tuple[str, Any]:
        """Enqueue the graph on ``stream``, a stream handle. The parameters are copied before this returns.

        Returns the name of the last driver call and its code.
        """
        with self._lock:
            self._params.kernelParams = parameters
            (code,) = self._set_params(self._executable, self._node, self._params)
            if code:
                return "cuGraphExecKernelNodeSetParams", code
            return "cuGraphLaunch", self._launch(self._executable, stream)[0]
