"""The command line of `mmjax.serve`: vLLM's names, as far as mmjax has what they set."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from mmjax.config import (
    CacheConfig,
    DtypeName,
    EngineConfig,
    HasherAlgorithm,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    ProcessorCacheType,
    SchedulerConfig,
    SchedulingPolicy,
    ServerConfig,
)
from mmjax.model_source import load_model_config

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

VLLM_FLAGS_WITHOUT_MEANING_YET = frozenset(
    (
        "--uds --ssl-keyfile --ssl-certfile --middleware --disable-fastapi-docs "
        "--enable-offline-docs --enable-request-id-headers "
        "--h11-max-incomplete-event-size "
        "--h11-max-header-count --enable-log-requests --enable-log-outputs --max-log-len "
        "--log-config-file --chat-template-content-format --response-role "
        "--enable-auto-tool-choice --tool-call-parser --reasoning-parser --tokenizer "
        "--max-num-queued-tokens --kv-cache-dtype "
        "--data-parallel-size "
        "--enforce-eager --generation-config "
        "--override-generation-config --structured-outputs-config --load-format "
        "--download-dir --trust-remote-code --hf-overrides --watchdog-config "
        "--enable-fault-tolerance --media-io-kwargs --mm-encoder-tp-mode "
        "--mm-encoder-only --skip-mm-profiling --interleave-mm-strings "
        "--language-model-only --allowed-local-media-path "
        "--allowed-media-domains --config "
        "--enable-prompt-tokens-details --quantization -q"
    ).split()
)
"""Flags that vLLM has and mmjax refuses by name, so that nobody believes them to work."""


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags; ends the process with a message where they are wrong."""
    parser = _build_parser()
    namespace, unknown = parser.parse_known_args(argv)
    for flag in unknown:
        name = flag.partition("=")[0]
        if name in VLLM_FLAGS_WITHOUT_MEANING_YET:
            parser.error(f"`{name}` is a flag of vLLM's that mmjax does not have yet; leave it out")
    if unknown:
        parser.error(f"unknown argument `{unknown[0]}`; `--help` lists what there is")
    if namespace.model is not None and namespace.model_flag is not None:
        parser.error("the model is given twice; give it once, with or without `--model`")
    namespace.model = namespace.model or namespace.model_flag
    return namespace


def to_engine_config(flags: argparse.Namespace) -> EngineConfig:
    """Read the checkpoint's configuration; return what P1 starts with."""
    return EngineConfig(
        model=_to_model_config(flags),
        cache=CacheConfig(
            block_size=flags.block_size,
            kv_cache_memory_bytes=flags.kv_cache_memory_bytes,
            gpu_memory_utilization=flags.gpu_memory_utilization,
            encoder_cache_size=flags.encoder_cache_size,
            enable_prefix_caching=flags.enable_prefix_caching,
            prefix_caching_hash_algo=flags.prefix_caching_hash_algo,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=flags.max_num_seqs,
            max_num_batched_tokens=flags.max_num_batched_tokens,
            max_num_queued_reqs=flags.max_num_queued_reqs,
            max_num_encoder_input_tokens=flags.max_num_encoder_input_tokens,
            disable_chunked_mm_input=flags.disable_chunked_mm_input,
            enable_chunked_prefill=flags.enable_chunked_prefill,
            scheduling_policy=flags.scheduling_policy,
            async_scheduling=flags.async_scheduling,
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=flags.tensor_parallel_size,
            coordinator_address=flags.distributed_coordinator,
            num_processes=flags.distributed_num_processes,
            process_id=flags.distributed_process_id,
        ),
        compilation_cache_dir=flags.compilation_cache_dir,
        compile_threads=flags.compile_threads,
        use_tqdm=flags.use_tqdm_on_load,
        log_level=flags.log_level,
    )


def to_server_config(flags: argparse.Namespace) -> ServerConfig:
    """Return what the HTTP door needs."""
    return ServerConfig(
        host=flags.host,
        port=flags.port,
        api_keys=tuple(flags.api_key or ()),
        allowed_origins=tuple(flags.allowed_origins),
        root_path=flags.root_path,
        max_request_bytes=flags.max_request_bytes,
        request_timeout_s=flags.request_timeout,
        request_body_timeout_s=flags.request_body_timeout,
        sse_keep_alive_interval_s=flags.sse_keep_alive_interval,
        shutdown_timeout_s=flags.shutdown_timeout,
        trust_request_chat_template=flags.trust_request_chat_template,
        uvicorn_log_level=flags.uvicorn_log_level,
        disable_access_log_for_endpoints=flags.disable_access_log_for_endpoints,
        renderer_num_workers=flags.renderer_num_workers,
    )


def _to_model_config(flags: argparse.Namespace) -> ModelConfig:
    return load_model_config(
        flags.model,
        revision=flags.revision,
        dtype=flags.dtype,
        max_model_len=flags.max_model_len,
        served_model_name=flags.served_model_name,
        chat_template=flags.chat_template,
        seed=flags.seed,
        mm=MultiModalConfig(
            limit_mm_per_prompt=flags.limit_mm_per_prompt,
            mm_processor_kwargs=flags.mm_processor_kwargs,
            mm_processor_cache_type=flags.mm_processor_cache_type,
            mm_processor_cache_gb=flags.mm_processor_cache_gb,
            mm_shm_cache_max_object_size_mb=flags.mm_shm_cache_max_object_size_mb,
            mm_hasher_algorithm=flags.mm_hasher_algorithm,
            max_image_pixels=flags.max_image_pixels,
            max_image_bytes=flags.max_image_bytes,
            max_media_request_decode_bytes=flags.max_media_request_decode_bytes,
            max_media_decode_bytes=flags.max_media_decode_bytes,
            trust_request_mm_kwargs=flags.trust_request_mm_kwargs,
            trust_media_ids=flags.trust_media_ids,
            enable_mm_embeds=flags.enable_mm_embeds,
        ),
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mmjax.serve",
        description="Serve a multimodal model over OpenAI's HTTP API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_model_flags(parser)
    engine = parser.add_argument_group("engine")
    _add_engine_flags(engine)
    _add_cache_flags(engine)
    _add_parallel_flags(parser.add_argument_group("several devices"))
    media = parser.add_argument_group("media")
    _add_media_flags(media)
    _add_media_limit_flags(media)
    return parser


def _add_server_flags(group: Any) -> None:
    defaults = ServerConfig()
    add = group.add_argument
    add("--host", default=defaults.host, help="address to listen on")
    add("--port", type=_port, default=defaults.port, help="0: any free one")
    add("--api-key", type=_api_key, nargs="+", help="keys that requests must bear (one of them)")
    add("--allowed-origins", type=_json_list, default=[], help="JSON list, for browsers (CORS)")
    add("--root-path", default=defaults.root_path, help="prefix that a proxy strips")
    add("--max-request-bytes", type=_positive, default=defaults.max_request_bytes, help="of a body")
    add(
        "--request-timeout",
        type=_seconds,
        default=defaults.request_timeout_s,
        help="seconds after which a request gets 408 (a stream: an error event); 0: never",
    )
    add(
        "--request-body-timeout",
        type=_seconds,
        default=defaults.request_body_timeout_s,
        help="seconds of silence in a body after which its request gets 408; 0: never",
    )
    add(
        "--sse-keep-alive-interval",
        type=_seconds,
        default=defaults.sse_keep_alive_interval_s,
        help="seconds of silence after which a stream gets a comment line; 0: never",
    )
    add(
        "--shutdown-timeout",
        type=_seconds,
        default=defaults.shutdown_timeout_s,
        help="seconds that running requests get after SIGTERM; a second one ends at once",
    )
    add("--trust-request-chat-template", action="store_true", help="take templates from requests")
    add("--uvicorn-log-level", choices=LOG_LEVELS, default=defaults.uvicorn_log_level, help=" ")
    add(
        "--disable-access-log-for-endpoints",
        type=_paths,
        metavar="PATHS",
        default=",".join(defaults.disable_access_log_for_endpoints),
        help="comma-separated paths whose requests get no access line; '' for none",
    )
    add("--log-level", choices=LOG_LEVELS, default="info", help="of both processes")


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="directory or hub id; without one, the embedded default"
    )
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--served-model-name", help="name that requests use; the model's own by default")
    add("--dtype", choices=get_args(DtypeName), default="auto", help="auto: float32 on CPU")
    add("--max-model-len", type=_positive, help="tokens of prompt and answer together")
    add("--chat-template", help="file, or the template itself")
    add("--seed", type=_seed, default=0, help="for requests that bring none")


def _add_engine_flags(group: Any) -> None:
    scheduler = SchedulerConfig()
    add = group.add_argument
    add("--max-num-seqs", type=_positive, default=scheduler.max_num_seqs, help="run at once")
    add(
        "--max-num-batched-tokens",
        type=_positive,
        default=scheduler.max_num_batched_tokens,
        help="computed in one step",
    )
    add(
        "--max-num-queued-reqs",
        type=_positive,
        default=scheduler.max_num_queued_reqs,
        help="wait at once; more get 429",
    )
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=scheduler.async_scheduling,
        help="prepare a step while the device computes the one before",
    )
    add(
        "--max-num-encoder-input-tokens",
        type=_positive,
        help="embeddings that the encoder computes in one step; default: --max-num-batched-tokens",
    )
    add(
        "--disable-chunked-mm-input",
        action="store_true",
        help="compute an image's tokens in one step (always so where they see each other)",
    )
    add(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=scheduler.enable_chunked_prefill,
        help="compute long prompts over several steps",
    )
    add(
        "--scheduling-policy",
        choices=get_args(SchedulingPolicy),
        default=scheduler.scheduling_policy,
        help="who goes first: by arrival, or by the requests' `priority` (lowest first)",
    )
    add("--compile-threads", type=_positive, help="default: one for each core, at most 8")
    add("--compilation-cache-dir", type=Path, help="default: ~/.cache/mmjax/xla")
    add(
        "--use-tqdm-on-load",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="progress bars while loading",
    )


def _add_parallel_flags(group: Any) -> None:
    defaults = ParallelConfig()
    add = group.add_argument
    add(
        "--tensor-parallel-size",
        "-tp",
        type=_positive,
        default=defaults.tensor_parallel_size,
        help="devices that share the model, of all processes together",
    )
    add("--distributed-coordinator", metavar="HOST:PORT", help="where the processes meet")
    add(
        "--distributed-num-processes",
        type=_positive,
        default=defaults.num_processes,
        help="one a host; all get the same flags but the next",
    )
    add(
        "--distributed-process-id",
        type=int,
        default=defaults.process_id,
        help="0 serves, at the coordinator's host; the others compute along, without HTTP",
    )


def _add_cache_flags(group: Any) -> None:
    cache = CacheConfig()
    add = group.add_argument
    add(
        "--encoder-cache-size",
        type=_positive,
        help="embeddings that are kept; default: --max-num-batched-tokens",
    )
    add("--block-size", type=_positive, default=cache.block_size, help="slots of a KV block")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=cache.enable_prefix_caching,
        help="share the KV cache of equal beginnings",
    )
    add(
        "--prefix-caching-hash-algo",
        choices=("sha256", "blake3"),
        default=cache.prefix_caching_hash_algo,
        help="names blocks of tokens",
    )
    add(
        "--gpu-memory-utilization",
        type=float,
        default=cache.gpu_memory_utilization,
        help="share of a device's memory that the engine takes; on CPU, of what is free",
    )
    add("--kv-cache-memory-bytes", type=_positive, help="of the KV cache; default: what is useful")


def _add_media_flags(group: Any) -> None:
    defaults = MultiModalConfig()
    add = group.add_argument
    add("--limit-mm-per-prompt", type=_json_object, default={}, help='JSON, as {"image": 4}')
    add("--mm-processor-kwargs", type=_json_object, default={}, help="JSON, for HF's processor")
    add(
        "--mm-processor-cache-type",
        choices=get_args(ProcessorCacheType),
        default=defaults.mm_processor_cache_type,
        help="processed images stay in P1 (lru), in shared memory, or in P0",
    )
    add(
        "--mm-processor-cache-gb",
        type=_size_gb,
        default=defaults.mm_processor_cache_gb,
        help="of processed images; 0: none",
    )
    add(
        "--mm-shm-cache-max-object-size-mb",
        type=_positive,
        default=defaults.mm_shm_cache_max_object_size_mb,
        help="of one image in shared memory; a larger one goes to P1 by message",
    )
    add(
        "--mm-hasher-algorithm",
        choices=get_args(HasherAlgorithm),
        default=defaults.mm_hasher_algorithm,
        help=" ",
    )
    add(
        "--trust-request-mm-kwargs", action="store_true", help="take processor kwargs from requests"
    )
    add(
        "--enable-mm-embeds",
        action="store_true",
        help="take embeddings in place of media, where the model can",
    )
    add(
        "--renderer-num-workers",
        type=_positive,
        default=ServerConfig().renderer_num_workers,
        help="threads that process prompts and media, each with a processor of its own; half as "
        "many more decode large images",
    )
    add(
        "--trust-media-ids",
        action="store_true",
        help="take the uuid of an image for its content, whoever sends it",
    )


def _add_media_limit_flags(group: Any) -> None:
    defaults = MultiModalConfig()
    add = group.add_argument
    add("--max-image-pixels", type=_positive, default=defaults.max_image_pixels, help="of one")
    add(
        "--max-image-bytes",
        type=_positive,
        default=defaults.max_image_bytes,
        help="of one, encoded",
    )
    add(
        "--max-media-request-decode-bytes",
        type=_positive,
        default=defaults.max_media_request_decode_bytes,
        help="of one request's images, decoded (4 a pixel); more get 400",
    )
    add(
        "--max-media-decode-bytes",
        type=_positive,
        default=defaults.max_media_decode_bytes,
        help="of all images decoded at once; more wait",
    )


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("give a JSON object, as in '{\"image\": 4}'")
    return value


def _json_list(text: str) -> list[str]:
    value = json.loads(text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError("give a JSON list of texts")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time; give seconds, or 0")
    return value


def _size_gb(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no size; give gigabytes, or 0")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{value} is no seed; give a number of 64 bits")
    return value


def _api_key(text: str) -> str:
    # What a header cannot carry, or carries as nothing, would lock all out or let all in.
    if not (text.isascii() and text.isprintable() and text.strip() == text and text):
        raise argparse.ArgumentTypeError("a key needs ASCII characters, and no space around them")
    return text


def _paths(text: str) -> tuple[str, ...]:
    paths = tuple(path for path in (part.strip() for part in text.split(",")) if path)
    for path in paths:
        if not path.startswith("/"):
            raise argparse.ArgumentTypeError(f"`{path}` is no path; give them as in /health,/ready")
    return paths


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"{value} is no port")
    return value
