"""The source of an engine that is none, for the benchmark of vLLM.

Its "speed" and tokens depend on its arguments, as vLLM's would. "diary": a file that it writes to: processes that it leaves
behind, which hold all that it has open, its port, and its runs with their requests and the tokens of each. Those in "ends" and
"hangs" are its last. Requests come while it sleeps, and it runs when it's awake.
"""

from __future__ import annotations

LLM = """
import os, time
from types import SimpleNamespace as Object

class SamplingParams:
    def __init__(self, **given): self.__dict__.update(given)

class LLM:
    def __init__(self, **given):
        if given.get("broken"): raise ValueError("no such engine")
        self.given = given
        print("INFO x] tw_compile: on, fusing" if os.environ["TW_COMPILE"] == "1" else "INFO x] nothing", flush=True)
        time.sleep(given.get("slow", 0.0))
        variant = "off-nccl" if given.get("disable_custom_all_reduce") else "off"
        self.name = "fuse" if given.get("additional_config") else variant
        if given["dtype"] == "float32": self.name = "reference"
        self.error = given.get("errors", {}).get(self.name, 0.0)
        self.runs, self.awake = 0, True
        if "diary" in given:
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            self.write("left", os.getpid(), child)
            self.write("port", self.name, os.environ["VLLM_PORT"])

    def write(self, *words):
        if "diary" in self.given:
            with open(self.given["diary"], "a") as diary: print(*words, file=diary)

    def collective_rpc(self, name, args=()):
        if name == "tw_compile_measure": self.write("measure", self.name, self.runs)
        passes = os.environ["TW_COMPILE"] == "1" and not self.given.get("ignored")
        facts = {"compile_seconds": 1.5, "peak_bytes": 2**30, "device_name": "none", "passes": passes}
        options = self.given.get("additional_config", {}).get("tw_compile", {})
        facts["wires"] = {options["wire"]: 2} if "wire" in options and not self.given.get("exact") else {}
        facts["prefetching"] = 0 if options.get("prefetch") == "off" or self.given.get("exact") else 2
        asked = self.given.get("compilation_config", {}).get("pass_config", {}).get("fuse_allreduce_rms", not passes)
        facts |= {"flashinfer_importable": True, "flashinfer_fusion_bytes": 2**26 if asked else 0}
        return [facts] * self.given["tensor_parallel_size"] if name == "tw_compile_facts" else None

    def sleep(self, level):
        assert level == 0 and self.awake
        self.awake = False

    def enqueue(self, prompts, params, use_tqdm):
        assert not self.awake
        self.asked = list(zip(prompts, params))

    def wake_up(self, tags):
        assert tags == ["scheduling"]
        self.awake = True

    def wait_for_completion(self, use_tqdm):
        assert self.awake
        self.runs += 1
        what = self.name, len(self.asked), self.asked[0][1].max_tokens
        self.write("begin", *what)
        if self.given.get("ends", {}).get(self.name) == self.runs: os._exit(self.given.get("code", 3))
        if self.given.get("hangs", {}).get(self.name) == self.runs: time.sleep(60)
        begin, speed = time.monotonic(), 2.0 if self.given.get("additional_config") else 1.0
        time.sleep(0.002)
        found = []
        for prompt, params in self.asked:
            ids = [sum(prompt["prompt_token_ids"]) % 97 + number for number in range(params.max_tokens)]
            last = begin + 1 + (len(ids) - 1) * 0.01 / speed
            stats = Object(first_token_ts=begin + 1, last_token_ts=last, num_generation_tokens=len(ids))
            asked = getattr(params, "prompt_logprobs", None) is not None
            exact = [{token: Object(logprob=-(token % 7) + self.error)} for token in prompt["prompt_token_ids"]]
            logprobs = [None, *exact[1:]] if asked else None
            output = Object(token_ids=ids)
            found.append(Object(request_id="0", outputs=[output], metrics=stats, prompt_logprobs=logprobs))
        self.write("end", *what)
        return found
"""
