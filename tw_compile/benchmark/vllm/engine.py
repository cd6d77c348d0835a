"""The process of one engine: starts vLLM, runs the traces, writes their times and tokens. Imports vLLM.

Started by :mod:`tw_compile.benchmark.vllm.turns` as ``python -m tw_compile.benchmark.vllm.engine JOB.json RESULT.json TURNS
LINE SCRATCH``. TURNS is the number of a socket that says when it is this engine's turn. LINE and SCRATCH are for
``child.live_with``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tw_compile import child
from tw_compile.benchmark.vllm.traces import ACCURACY, TURN, Trace, prompt_tokens, turns, warm_trace


class ParentGoneError(RuntimeError):
    """The benchmark that says whose turn it is has ended."""


def run(job: dict[str, Any], driver: socket.socket) -> dict[str, Any]:
    """Return the engine's facts, and for each trace its tokens and the rounds' times in seconds, or its log-probabilities.

    Before each timed trace the engine serves a short request that is not timed, so that all engines begin alike. Engines take
    turns, and how long an engine has been idle depends on its place. In one round the first and the last engine wait for the
    others' turns at the trace before, and in the next round for those at this trace. The engines in the middle wait for some
    turns of both in every round. vLLM's workers stop polling after one second. The time to wake them would be in the time to
    the first token. Engines that were started together have disturbed what each measured at its start. So each measures again
    in its first turn.
    """
    begin = time.monotonic()
    from vllm import LLM

    llm = LLM(**job["arguments"])
    startup = time.monotonic() - begin
    llm.collective_rpc("tw_compile_randomise", args=(job["seed"], job["dtype"]))
    traces = [Trace(trace["kind"], tuple(trace["prompts"]), tuple(trace["outputs"])) for trace in job["traces"]]
    warm = warm_trace(traces, job["arguments"]["max_num_batched_tokens"])
    prompts = {trace: prompt_tokens(trace, job["vocabulary"], job["seed"]) for trace in (*traces, warm)}
    results: dict[Trace, dict[str, Any]] = {trace: {"rounds": []} for trace in traces}
    for place, (number, trace) in enumerate(turns(traces, job["repeats"])):
        if not await_turn(driver):
            break
        if place == 0 and job["together"]:
            llm.collective_rpc("tw_compile_measure")
        if number > 0:
            _once(llm, warm, prompts[warm])
        outputs, times = _once(llm, trace, prompts[trace])
        if number > 0:
            results[trace]["rounds"].append(times)
        elif trace.kind == ACCURACY:
            results[trace]["logprobs"] = logprobs(outputs, prompts[trace])
        else:
            results[trace]["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    else:
        await_turn(driver)  # an engine that ends would disturb the times of those that still run
    facts = llm.collective_rpc("tw_compile_facts")
    return {
        "startup_seconds": startup,
        "compile_seconds": max(worker["compile_seconds"] for worker in facts),
        "peak_bytes": max(worker["peak_bytes"] for worker in facts),
        "device_name": facts[0]["device_name"],
        "passes": all(worker["passes"] for worker in facts),
        "wires": facts[0]["wires"],
        "prefetching": facts[0]["prefetching"],
        "flashinfer_importable": facts[0]["flashinfer_importable"],
        "flashinfer_fusion_bytes": facts[0]["flashinfer_fusion_bytes"],
        "traces": list(results.values()),
    }


def logprobs(outputs: list[Any], prompts: list[list[int]]) -> list[float]:
    """The log-probability of every prompt token but the first of each prompt, in order."""
    return [
        given[token].logprob
        for output, prompt in zip(outputs, prompts, strict=True)
        for given, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]


def await_turn(driver: socket.socket) -> bool:
    """Say that this engine is ready, or that its turn is over, and wait for the next turn. Returns whether there is one."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        driver.sendall(TURN)
        answer = driver.recv(1)
    if not answer:
        raise ParentGoneError("the benchmark that started this engine has ended")
    return answer == TURN


def _once(llm: Any, trace: Trace, prompts: list[list[int]]) -> tuple[list[Any], dict[str, Any]]:
    """Run a trace. All requests are queued before the clock starts, so that steps hold the same requests in every run.

    Times of tokens are the engine's: from the start of the clock to the first token, and the mean time between later tokens.
    """
    from vllm import SamplingParams

    # Asking for log-probabilities of prompts does not change steps. vLLM makes logits of one request or 1024 tokens at a time.
    more = {"prompt_logprobs": 0} if trace.kind == ACCURACY else {}
    # Each request has its own object, because vLLM writes to it.
    asked = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **more)
        for count in trace.outputs
    ]
    llm.sleep(level=0)
    llm.enqueue([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    begin = time.monotonic()
    llm.wake_up(tags=["scheduling"])
    outputs = llm.wait_for_completion(use_tqdm=False)
    seconds = time.monotonic() - begin
    for output, count in zip(outputs, trace.outputs, strict=True):
        if len(output.outputs[0].token_ids) != count:
            raise RuntimeError(f"request {output.request_id}: {len(output.outputs[0].token_ids)} tokens, not {count}")
    stats = [output.metrics for output in outputs]
    later = [times for times in stats if times.num_generation_tokens > 1]
    return outputs, {
        "seconds": seconds,
        "first": [times.first_token_ts - begin for times in stats],
        "between": [
            (times.last_token_ts - times.first_token_ts) / (times.num_generation_tokens - 1) for times in later
        ],
    }


def main(job: str, result: str, driver: str, line: str, scratch: str) -> None:
    child.live_with(int(line), scratch)
    try:
        findings = run(json.loads(Path(job).read_text()), socket.socket(fileno=int(driver)))
    except ParentGoneError:
        child.wait_for_end()
    Path(result).write_text(json.dumps(findings))


if __name__ == "__main__":
    main(*sys.argv[1:])
