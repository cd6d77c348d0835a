"""How each operator treats the token axis, by operator. Importing the package registers the rules of all modules here."""

from tw_compile.passes.split.rules import attention, comm, compute, functionalised, norm, routing, row_wise, shape

__all__ = ["attention", "comm", "compute", "functionalised", "norm", "routing", "row_wise", "shape"]
