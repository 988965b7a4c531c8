"""vLLM's flags that mmjax does not have: for each, why, and what to give instead."""

from collections.abc import Mapping

_ALWAYS = "it is always so"
_NOT_YET = "mmjax does not have it yet"

REFUSED_FLAGS: Mapping[str, str] = {
    "--middleware": "no code is loaded by name; put a proxy before the server",
    "--enable-offline-docs": f"{_ALWAYS}: /docs loads nothing from elsewhere",
    "--enable-request-id-headers": f"{_ALWAYS}: every response has X-Request-Id",
    "--log-config-file": "give `--log-format`, `--log-level` and `--uvicorn-log-level`",
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
    "--mm-encoder-tp-mode": "a tower is sharded as its model is; give `--tensor-parallel-size`",
    "--mm-encoder-only": "mmjax has no engine without a language model",
    "--skip-mm-profiling": "memory is measured by what is compiled; lower `--limit-mm-per-prompt`",
    "--language-model-only": """give `--limit-mm-per-prompt '{"image": 0}'`""",
    "--enable-prompt-tokens-details": f"{_ALWAYS}: `usage` has `prompt_tokens_details`",
    "-q": "give `--quantization`",
}
"""Flag -> a clause that says why, or what to give instead."""
