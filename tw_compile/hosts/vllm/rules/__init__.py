"""Token rules of vLLM's operators whose declaration by name is not enough. Importing the package registers all of its rules."""

from tw_compile.hosts.vllm.rules import attention, experts, lora

__all__ = ["attention", "experts", "lora"]
