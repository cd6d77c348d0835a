"""Token rules of vLLM's operators of which a name does not say enough. Importing the package registers those of all modules."""

from tw_compile.hosts.vllm.rules import attention, experts, lora

__all__ = ["attention", "experts", "lora"]
