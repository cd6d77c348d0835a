"""Generate offline with vLLM, with tw_compile's passes on. It needs as many GPUs as ranks.

    python examples/vllm_offline.py MODEL 2

The table under ``tw_compile`` may have any option of ``tw_compile.Config``. One line at the start says which
all_reduces are fused, and from how many tokens on steps are split.
"""

from __future__ import annotations

import sys


def main(model: str, ranks: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model, tensor_parallel_size=ranks, additional_config={"tw_compile": {"split": "auto"}})
    outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=32))
    print(outputs[0].outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
