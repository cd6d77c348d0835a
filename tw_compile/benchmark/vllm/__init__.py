"""``tw-compile bench vllm``: vLLM engines without the passes and with them, in turn, on the same traces."""
