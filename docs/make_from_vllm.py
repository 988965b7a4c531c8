"""Write the tables of docs/from_vllm.md: what of vLLM's flags and fields is here.

`.venv/bin/python docs/make_from_vllm.py`; a test holds the page to what this writes.
"""

from collections.abc import Iterator
from pathlib import Path

from mmjax.config.engine_config import serve_settings
from mmjax.config.refused_flags import HELD_FLAGS, REFUSED_FLAGS, refusal_of
from mmjax.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from mmjax.server.openai.request_body import REPLACED_FIELDS

PAGE = Path(__file__).resolve().parent / "from_vllm.md"

SAME_FLAGS = """
    --host --port --uds --ssl-keyfile --ssl-certfile --api-key --allowed-origins --root-path
    --response-role --enable-auto-tool-choice --tool-call-parser --reasoning-parser
    --trust-request-chat-template --h11-max-incomplete-event-size --h11-max-header-count
    --disable-fastapi-docs --enable-log-requests --enable-log-outputs --max-log-len
    --otlp-traces-endpoint --uvicorn-log-level --model --max-model-len --dtype --quantization
    --served-model-name --revision --download-dir --generation-config
    --override-generation-config --chat-template --chat-template-content-format
    --interleave-mm-strings --logprobs-mode --seed --limit-mm-per-prompt --mm-processor-kwargs
    --mm-processor-cache-type --mm-processor-cache-gb --mm-shm-cache-max-object-size-mb
    --media-io-kwargs --allowed-media-domains --allowed-local-media-path --enable-mm-embeds
    --max-num-seqs --max-num-batched-tokens --disable-chunked-mm-input --enable-chunked-prefill
    --scheduling-policy --async-scheduling --block-size --kv-cache-memory-bytes
    --gpu-memory-utilization --enable-prefix-caching --prefix-caching-hash-algo
    --tensor-parallel-size --enable-lora --lora-modules --max-loras --max-lora-rank
    --max-cpu-loras --lora-dtype --enable-tower-connector-lora --use-tqdm-on-load
    --load-format --disable-access-log-for-endpoints --renderer-num-workers --speculative-config
""".split()
"""vLLM's flags that mmjax has under the same name."""

OTHER_PLACES = {
    "VLLM_API_KEY": "`MMJAX_API_KEY`",
    "VLLM_IMAGE_FETCH_TIMEOUT": "`--media-fetch-timeout`",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "`--no-media-url-allow-redirects`",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "`--allow-runtime-lora-updating` with `--lora-dir`",
    "VLLM_LOGGING_LEVEL": "`--log-level`",
    "VLLM_SERVER_DEV_MODE": "`--allow-engine-control` with `--api-key`: `/sleep` and its kin",
}
"""vLLM's variables of the environment -> what mmjax has in their place."""

FIELDS_WITH_A_FLAG = {
    "chat_template": "--trust-request-chat-template",
    "chat_template_kwargs": "--trust-request-chat-template",
    "mm_processor_kwargs": "--trust-request-mm-kwargs",
    "media_io_kwargs": "--trust-request-mm-kwargs",
    "priority": "--scheduling-policy priority",
}
"""Fields that a server takes with a flag alone."""


def make_tables() -> dict[str, str]:
    """Return each table by its name in the page."""
    return {
        "same flags": _make_same_flags(),
        "other flags": "\n".join(_make_other_flags()),
        "fields": "\n".join(_make_fields()),
    }


def make_page() -> str:
    """Return the page, with its tables written anew."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in make_tables().items():
        before, begin, rest = page.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"the page has no place for the table `{name}`"
        page = f"{before}{begin}\n{table}\n\n{end}{after}"
    return page


def _make_same_flags() -> str:
    known = {one.flag for one in serve_settings().values()}
    assert set(SAME_FLAGS) <= known, set(SAME_FLAGS) - known
    return ", ".join(f"`{flag}`" for flag in SAME_FLAGS) + "."


def _make_other_flags() -> Iterator[str]:
    yield "| vLLM's | here |"
    yield "|---|---|"
    for flag in sorted({*REFUSED_FLAGS, *HELD_FLAGS}, key=lambda flag: flag.lstrip("-")):
        yield f"| `{flag}` | {refusal_of(flag)} |"
    for variable, place in OTHER_PLACES.items():
        yield f"| `{variable}` in the environment | {place} |"


def _make_fields() -> Iterator[str]:
    yield "| field | here |"
    yield "|---|---|"
    for name, advice in REPLACED_FIELDS.items():
        yield f"| `{name}` | {advice} |"
    neutral = {**CompletionRequest.NEUTRAL, **ChatCompletionRequest.NEUTRAL}
    for name, flag in FIELDS_WITH_A_FLAG.items():
        but = ", but for what is true or false" if name == "chat_template_kwargs" else ""
        yield f"| `{name}` | with `{flag}` alone{but} |"
    for name, values in neutral.items():
        if name in FIELDS_WITH_A_FLAG:
            continue
        shown = " or ".join(f"`{value}`" for value in values if value is not None)
        shown += " or `n`" if name == "best_of" else ""
        rest = f"; {shown} is taken, which has no effect" if shown else ""
        yield f"| `{name}` | not there yet{rest} |"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
