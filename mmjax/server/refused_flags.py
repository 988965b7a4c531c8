"""vLLM's flags that mmjax does not have: for each, why, and what to give instead."""

from collections.abc import Mapping

_ALWAYS = "it is always so"
_NOT_YET = "mmjax does not have it yet"

REFUSED_FLAGS: Mapping[str, str] = {
    "--middleware": "no code is loaded by name; put a proxy before the server",
    "--disable-fastapi-docs": "there is no page at /docs to disable",
    "--enable-offline-docs": "there is no page at /docs",
    "--enable-request-id-headers": f"{_ALWAYS}: every response has X-Request-Id",
    "--h11-max-incomplete-event-size": f"{_NOT_YET}; h11's own limit holds, of 64 KiB",
    "--h11-max-header-count": f"{_NOT_YET}; h11's own limit holds, of 64 KiB",
    "--log-config-file": "give `--log-format`, `--log-level` and `--uvicorn-log-level`",
    "--chat-template-content-format": f"{_NOT_YET}; it is detected in the template",
    "--response-role": "an answer's role is `assistant`, as in OpenAI's API",
    "--enable-auto-tool-choice": _NOT_YET,
    "--tool-call-parser": _NOT_YET,
    "--reasoning-parser": _NOT_YET,
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
    "--load-format": f"{_ALWAYS} auto: safetensors, or a snapshot that `mmjax convert` wrote",
    "--trust-remote-code": "a checkpoint's code is never run; docs/models.md lists what is served",
    "--hf-overrides": "change config.json in a copy of the checkpoint's directory",
    "--watchdog-config": f"{_ALWAYS}: an engine that is silent for a minute is restarted",
    "--enable-fault-tolerance": f"{_ALWAYS}: an engine that ends is restarted",
    "--media-io-kwargs": "give `--mm-processor-kwargs`, `--max-image-pixels`",
    "--mm-encoder-tp-mode": "a tower is sharded as its model is; give `--tensor-parallel-size`",
    "--mm-encoder-only": "mmjax has no engine without a language model",
    "--skip-mm-profiling": "memory is measured by what is compiled; lower `--limit-mm-per-prompt`",
    "--interleave-mm-strings": f"{_ALWAYS}: images stay where the message has them",
    "--language-model-only": """give `--limit-mm-per-prompt '{"image": 0}'`""",
    "--allowed-local-media-path": _NOT_YET,
    "--allowed-media-domains": _NOT_YET,
    "--enable-prompt-tokens-details": f"{_ALWAYS}: `usage` has `prompt_tokens_details`",
    "-q": "give `--quantization`",
}
"""Flag -> a clause that says why, or what to give instead."""
