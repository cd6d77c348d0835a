"""How each operator treats the token axis, by operator: importing the package registers all rules."""

from tw_compile.passes.split.rules import attention, comm, compute, routing, shape, vllm

__all__ = ["attention", "comm", "compute", "routing", "shape", "vllm"]
