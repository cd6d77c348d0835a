"""Generate text with a Hugging Face checkpoint. Ranks share its weights, and tw_compile compiles the decode step.

    torchrun --nproc-per-node 2 examples/generate.py CHECKPOINT_FOLDER "Once upon a time"

Without GPUs the ranks are processes on the CPU. Such a run shows that the example works, but not how fast it is.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig
from transformers.distributed import DistributedConfig

from tw_compile import collect_reports


def main(checkpoint: str, prompt: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    sharded = DistributedConfig(tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=sharded).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)

    compiled = CompileConfig(backend="tw_compile")
    compiled._compile_all_devices = True  # transformers would leave the model uncompiled on a CPU
    with torch.inference_mode(), collect_reports() as reports:
        tokens = model.generate(
            **inputs, max_new_tokens=8, do_sample=False, cache_implementation="static", compile_config=compiled
        )
    if dist.get_rank() == 0:
        print(tokenizer.decode(tokens[0]))
        for report in reports:
            print(report.summary)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main(*sys.argv[1:3])
    dist.destroy_process_group()
