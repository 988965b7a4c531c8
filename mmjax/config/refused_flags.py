"""vLLM's flags that mmjax does not have: which hold as it is, and what to give for the others."""

import json
from collections.abc import Mapping

_NO_CODE = "no code is loaded by name"
_NOT_YET = "mmjax does not have it yet"

HELD_FLAGS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("--enable-request-id-headers", "--enable-prompt-tokens-details"),
            *("--enable-offline-docs", "--enable-fault-tolerance", "--disable-log-requests"),
            *("--disable-custom-all-reduce", "--enable-sleep-mode"),
            "--enable-server-load-tracking",
        ),
        (),
    ),
    **dict.fromkeys(("--data-parallel-size", "-dp", "--pipeline-parallel-size", "-pp"), ("1",)),
    **dict.fromkeys(("--allowed-methods", "--allowed-headers"), ('["*"]',)),
    **dict.fromkeys(("--api-server-count", "--num-scheduler-steps"), ("1",)),
    "--task": ("auto", "generate"),
    **dict.fromkeys(("--kv-cache-dtype", "--tokenizer-mode", "--model-impl"), ("auto",)),
    "--config-format": ("auto", "hf"),
    "--convert": ("auto", "none"),
    "--guided-decoding-backend": ("auto", "guidance"),
    "--max-logprobs": ("20",),
    "--mm-encoder-tp-mode": ("data",),
}
"""Flag -> the values that say what is so anyway, and so are taken; (): it has none."""

REFUSED_FLAGS: Mapping[str, str] = {
    "--middleware": f"{_NO_CODE}; put a proxy before the server",
    "--tool-parser-plugin": f"{_NO_CODE}; give `--tool-call-parser`",
    "--worker-cls": _NO_CODE,
    "--scheduler-cls": f"{_NO_CODE}; give `--scheduling-policy`",
    "--logits-processors": f"{_NO_CODE}; requests have `logit_bias` and `bad_words`",
    "--allowed-methods": "browsers may GET, POST and DELETE; give `--allowed-origins`",
    "--allowed-headers": "browsers may send any header; give `--allowed-origins`",
    "--disable-uvicorn-access-log": "give `--uvicorn-log-level warning`",
    "--enable-force-include-usage": "a request asks for it: `stream_options`",
    "--return-tokens-as-token-ids": "a request asks for it: `return_tokens_as_token_ids`",
    "--allow-credentials": "no cookie is read; a request has its key in `Authorization`",
    "--default-chat-template-kwargs": "give `--chat-template`, with the values written into it",
    "--default-mm-loras": "a request names its adapter as `model`; give `--lora-modules`",
    "--fully-sharded-loras": "an adapter is sharded as its layers are",
    "--hf-token": "set `HF_TOKEN` in the environment",
    "--config-format": "a checkpoint's config.json is Hugging Face's",
    "--optimization-level": "give `--precompile`",
    "--num-scheduler-steps": "give `--async-scheduling`, which is the default",
    "--enable-reasoning": "give `--reasoning-parser` alone",
    "--kv-transfer-config": _NOT_YET,
    "--log-config-file": "give `--log-format`, `--log-level` and `--uvicorn-log-level`",
    "--tokenizer": "the tokenizer is the checkpoint's; put another one into its directory",
    "--kv-cache-dtype": "the KV cache has the dtype of the weights; give `--dtype`",
    "--data-parallel-size": "run several servers behind a proxy; see `--tensor-parallel-size`",
    "-dp": "run several servers behind a proxy; see `--tensor-parallel-size`",
    "--pipeline-parallel-size": "layers are not divided; give `--tensor-parallel-size`",
    "-pp": "layers are not divided; give `--tensor-parallel-size`",
    "--enforce-eager": "all runs as compiled programs; give `--precompile none` for a quick start",
    "--compilation-config": "give `--precompile`, `--compile-threads`, `--compilation-cache-dir`",
    "-O": "give `--precompile`",
    "--structured-outputs-config": _NOT_YET,
    "--trust-remote-code": "a checkpoint's code is never run; docs/models.md lists what is served",
    "--hf-overrides": "change config.json in a copy of the checkpoint's directory",
    "--watchdog-config": "give `--engine-hang-timeout`",
    "--mm-encoder-tp-mode": "each device has whole towers, and encodes items of its own",
    "--mm-encoder-only": "mmjax has no engine without a language model",
    "--skip-mm-profiling": "memory is measured by what is compiled; lower `--limit-mm-per-prompt`",
    "--language-model-only": """give `--limit-mm-per-prompt '{"image": 0}'`""",
    "-q": "give `--quantization`",
    "--swap-space": "give `--kv-offload-gb`; a preempted request's blocks go there, too",
    "--cpu-offload-gb": "weights stay on the device; give `--quantization` to make them smaller",
    "--num-gpu-blocks-override": "give `--kv-cache-memory-bytes`",
    "--preemption-mode": "a request that is preempted is computed again",
    "--calculate-kv-scales": "the KV cache has the dtype of the weights; give `--dtype`",
    "--disable-sliding-window": "layers' windows are those of config.json",
    "--long-prefill-token-threshold": "give `--max-num-batched-tokens`",
    "--max-num-partial-prefills": "give `--max-num-batched-tokens`",
    "--max-long-partial-prefills": "give `--max-num-batched-tokens`",
    "--video-pruning-rate": "no frame is left out; give `--media-io-kwargs` to sample fewer",
    "--model-loader-extra-config": "weights are safetensors; see `--load-format`",
    "--ignore-patterns": "of a hub id no more than what is read is downloaded",
    "--speculative-model": "give `--speculative-config`",
    "--num-speculative-tokens": "give `--speculative-config`",
    "--max-seq-len-to-capture": "give `--max-model-len`",
    "--max-logprobs": "it is always 20",
    "--disable-log-stats": "an idle server logs none; give `--log-level warning`",
    "--tokenizer-mode": "the tokenizer is the checkpoint's; put another one into its directory",
    "--tokenizer-revision": "the tokenizer is the checkpoint's; give `--revision`",
    "--code-revision": "a checkpoint's code is never run; give `--revision`",
    "--skip-tokenizer-init": "send `prompt` as token ids; the tokenizer is always loaded",
    "--enable-expert-parallel": "experts are sharded as their model is",
    "--distributed-executor-backend": "give `--distributed-coordinator`; see docs/parallel.md",
    "--api-server-count": "one process answers; give `--renderer-num-workers`",
    "--data-parallel-backend": "run several servers behind a proxy; see `--tensor-parallel-size`",
    "--headless": "give `--distributed-process-id`; see docs/parallel.md",
    "--task": "give `--runner pooling` for vectors",
    "--convert": "give `--runner pooling` for vectors",
    "--guided-decoding-backend": "it is always llguidance",
    "--attention-backend": "the platform decides; see docs/performance.md",
    "--attention-config": "the platform decides; see docs/performance.md",
    "--mm-encoder-attn-backend": "the platform decides; see docs/performance.md",
    "--device": "it is the best that JAX finds; set `JAX_PLATFORMS` in the environment",
    "--model-impl": "mmjax has its own; docs/models.md lists what is served",
    "--rope-scaling": "change config.json in a copy of the checkpoint's directory",
    "--enable-prompt-embeds": "a prompt is text or token ids; see `--enable-mm-embeds`",
    "--disable-mm-preprocessor-cache": "give `--mm-processor-cache-gb 0`",
    "--ssl-ca-certs": "clients have no certificates; give `--api-key`",
}
"""Flag -> a clause that says why, or what to give instead."""


def is_held(flag: str, value: object) -> bool:
    """Return whether a flag of vLLM's, with its value, says what is so anyway."""
    values = HELD_FLAGS.get(flag)
    if values == ():
        return value in (True, "true")
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return values is not None and text in values


def refusal_of(flag: str) -> str | None:
    """Return why a flag of vLLM's is refused; None: there is no such flag."""
    held = " or ".join(f"`{value}`" for value in HELD_FLAGS.get(flag, ()))
    reason = REFUSED_FLAGS.get(flag)
    if flag in HELD_FLAGS and reason is None:
        return "it is always so, and can only be true"
    return f"{reason} (only {held} is taken)" if held else reason
