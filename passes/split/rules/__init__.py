"""How each operator treats the token axis, by operator. Importing the package registers the rules of all modules here."""

from tw_compile.passes.split.rules import attention, comm, compute, routing, shape, vllm

__all__ = ["attention", "comm", "compute", "routing", "shape", "vllm"]
