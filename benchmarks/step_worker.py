"""Decodes on request: `python step_worker.py mmjax|hf|vllm CHECKPOINT DTYPE`, each in a process.

Reads lines of JSON, `{"batch": B, "context": C, "tokens": N}`: B prompts of C random tokens, behind
each of which N more are decoded. Answers `{"first_s": ..., "decode_s": ...}`: the seconds until
each prompt has its first token, and those of the rest.
Imports nothing of this repository unless it is mmjax: the others may live in another interpreter.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Decode = Callable[[int, int, int], tuple[float, float]]
MAX_BATCH = 8
MAX_TOKENS = 300
"""Of a request: so many that the first still runs when the last has been read."""


def serve_mmjax(checkpoint: str, dtype: Any) -> Decode:
    """Return mmjax's decoding; its weights come from the formula that wrote the checkpoint."""
    del checkpoint
    from benchmarks.step_model import make_engine, make_request, text_config

    core = make_engine(
        text_config(), dtype=dtype, max_num_seqs=MAX_BATCH, max_num_batched_tokens=256
    )
    numbers = iter(range(10**9))

    def decode(batch: int, context: int, tokens: int) -> tuple[float, float]:
        requests = [make_request(next(numbers), context, MAX_TOKENS) for _ in range(batch)]
        start = time.perf_counter()
        for request in requests:
            core.add_request(request)
        begun: set[str] = set()
        while len(begun) < batch:
            begun.update(delta.request_id for delta in core.step())
        first = time.perf_counter()
        for _ in range(tokens):
            assert len(core.step()) == batch
        end = time.perf_counter()
        core.abort(begun)
        while core.has_unfinished():
            core.step()
        assert core.compilations == 0
        return first - start, end - first

    return decode


def serve_hf(checkpoint: str, dtype: Any) -> Decode:
    """Return HF's decoding: eager, sdpa, the faster of its two caches at each call's shape."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype)
    ).eval()

    def run(cache: Any, batch: int, context: int, tokens: int) -> tuple[float, float]:
        ids = torch.randint(3, 1000, (batch, context))
        with torch.inference_mode():
            start = time.perf_counter()
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
            first = time.perf_counter()
            for _ in range(tokens):
                ids = logits[:, -1:].argmax(-1)
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
            logits[:, -1:].argmax(-1)
            return first - start, time.perf_counter() - first

    def decode(batch: int, context: int, tokens: int) -> tuple[float, float]:
        static = StaticCache(model.config, max_cache_len=context + tokens + 1)
        dynamic = DynamicCache(config=model.config)
        runs = [run(cache, batch, context, tokens) for cache in (static, dynamic)]
        return min(first for first, _ in runs), min(rest for _, rest in runs)

    return decode


def serve_vllm(checkpoint: str, dtype: Any) -> Decode:
    """Return vLLM's decoding, in this process, through its engine's own steps."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="2", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1"
    )
    import random

    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=MAX_BATCH,
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    numbers = iter(range(10**9))

    def decode(batch: int, context: int, tokens: int) -> tuple[float, float]:
        params = SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
        )
        prompts = [[random.randrange(3, 1000) for _ in range(context)] for _ in range(batch)]
        start = time.perf_counter()
        for ids in prompts:
            engine.add_request(str(next(numbers)), {"prompt_token_ids": ids}, params)
        begun: set[str] = set()
        while len(begun) < batch:
            begun.update(output.request_id for output in engine.step())
        first = time.perf_counter()
        for _ in range(tokens):
            assert len(engine.step()) == batch
        end = time.perf_counter()
        engine.abort_request(list(begun))
        while engine.has_unfinished_requests():
            engine.step()
        return first - start, end - first

    return decode


def main() -> None:
    """Answer until the input ends."""
    kind, checkpoint, dtype = sys.argv[1:]
    # What a program prints while it loads must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    decode = {"mmjax": serve_mmjax, "hf": serve_hf, "vllm": serve_vllm}[kind](checkpoint, dtype)
    for line in sys.stdin:
        task = json.loads(line)
        first_s, decode_s = decode(task["batch"], task["context"], task["tokens"])
        print(json.dumps({"first_s": first_s, "decode_s": decode_s}), file=answers, flush=True)


if __name__ == "__main__":
    main()
