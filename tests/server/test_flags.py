"""vLLM's flags mean here what they mean there, or are refused by name."""

import argparse
from pathlib import Path

import pytest

from mmjax.config import ParallelConfig
from mmjax.errors import CheckpointError, ConfigError
from mmjax.server.flags import (
    VLLM_FLAGS_WITHOUT_MEANING_YET,
    parse_flags,
    to_engine_config,
    to_server_config,
)

ACCEPTED = (
    "--host h --port 1 --api-key a b --served-model-name n --dtype float32 --max-model-len 64 "
    "--max-num-seqs 2 --max-num-batched-tokens 128 --max-num-queued-reqs 3 "
    "--mm-processor-cache-gb 0.5 --mm-processor-cache-type shm "
    "--mm-shm-cache-max-object-size-mb 32 --mm-hasher-algorithm sha256 --block-size 16 "
    "--kv-cache-memory-bytes 1000000 --revision main --seed 7 --root-path /api "
    "--uvicorn-log-level warning --log-level debug --trust-request-mm-kwargs --trust-media-ids "
    "--trust-request-chat-template --compilation-cache-dir /cache --no-use-tqdm-on-load "
    "--request-body-timeout 6 --disable-access-log-for-endpoints /health,/x "
    "--sse-keep-alive-interval 3 --shutdown-timeout 4 --max-image-pixels 9 --max-image-bytes 8 "
    "--max-request-bytes 7 --no-enable-prefix-caching --prefix-caching-hash-algo blake3 "
    "--no-async-scheduling --gpu-memory-utilization 0.8 --encoder-cache-size 300 "
    "--max-num-encoder-input-tokens 200 --disable-chunked-mm-input --no-enable-chunked-prefill "
    "--scheduling-policy priority --compile-threads 3 --request-timeout 2.5 "
    "-tp 4 --distributed-coordinator h:1 --distributed-num-processes 2 "
    "--distributed-process-id 1"
).split()
JSON_FLAGS = [
    *("--limit-mm-per-prompt", '{"image": {"count": 2, "width": 64}, "video": 0}'),
    *("--mm-processor-kwargs", '{"do_pan_and_scan": true}'),
    *("--allowed-origins", '["https://example.com"]'),
    *("--chat-template", "{{ 1 }}"),
]


@pytest.fixture
def flags(tiny_gemma3: Path) -> argparse.Namespace:
    return parse_flags([str(tiny_gemma3), *ACCEPTED, *JSON_FLAGS])


def test_flags_reach_the_engine(flags: argparse.Namespace, tiny_gemma3: Path) -> None:
    config = to_engine_config(flags)
    assert config.model.path == tiny_gemma3
    assert config.model.public_name == "n"
    assert config.model.architecture == "Gemma3ForConditionalGeneration"
    assert (config.model.max_model_len, config.model.dtype, config.model.seed) == (64, "float32", 7)
    assert config.model.chat_template == "{{ 1 }}"
    assert config.model.mm.limit("image") == 2
    assert config.model.mm.media_options("image") == {"width": 64}
    assert config.model.mm.limit("video") == 0
    assert config.model.mm.mm_processor_kwargs == {"do_pan_and_scan": True}
    assert config.model.mm.mm_hasher_algorithm == "sha256"
    assert config.model.mm.mm_processor_cache_type == "shm"
    assert config.model.mm.mm_processor_cache_gb == 0.5
    assert config.model.mm.mm_shm_cache_max_object_size_mb == 32
    assert config.model.mm.trust_request_mm_kwargs
    assert config.model.mm.trust_media_ids
    assert (config.model.mm.max_image_pixels, config.model.mm.max_image_bytes) == (9, 8)
    assert (config.cache.block_size, config.cache.kv_cache_memory_bytes) == (16, 1_000_000)
    assert config.cache.prefix_caching_hash_algo == "blake3"
    assert (config.cache.gpu_memory_utilization, config.cache.encoder_cache_size) == (0.8, 300)
    assert config.scheduler.max_num_encoder_input_tokens == 200
    assert config.scheduler.disable_chunked_mm_input
    assert not config.scheduler.enable_chunked_prefill
    assert config.scheduler.scheduling_policy == "priority"
    assert config.compile_threads == 3
    assert to_server_config(flags).request_timeout_s == 2.5
    assert not config.cache.enable_prefix_caching
    assert config.scheduler.max_num_seqs == 2
    assert config.scheduler.max_num_batched_tokens == 128
    assert config.scheduler.max_num_queued_reqs == 3
    assert config.log_level == "debug"
    assert not config.scheduler.async_scheduling
    assert config.parallel == ParallelConfig(
        tensor_parallel_size=4, coordinator_address="h:1", num_processes=2, process_id=1
    )
    assert config.compilation_cache_dir == Path("/cache")
    assert not config.use_tqdm


def test_flags_reach_the_server(flags: argparse.Namespace) -> None:
    config = to_server_config(flags)
    assert (config.host, config.port, config.root_path) == ("h", 1, "/api")
    assert config.api_keys == ("a", "b")
    assert config.allowed_origins == ("https://example.com",)
    assert (config.sse_keep_alive_interval_s, config.shutdown_timeout_s) == (3.0, 4.0)
    assert config.request_body_timeout_s == 6.0
    assert config.disable_access_log_for_endpoints == ("/health", "/x")
    assert config.max_request_bytes == 7
    assert config.trust_request_chat_template
    assert config.uvicorn_log_level == "warning"


def test_access_lines_may_all_be_wanted() -> None:
    assert parse_flags([]).disable_access_log_for_endpoints == ("/health", "/ready", "/metrics")
    assert (
        parse_flags(["--disable-access-log-for-endpoints", ""]).disable_access_log_for_endpoints
        == ()
    )


def test_the_model_may_be_a_flag() -> None:
    assert parse_flags(["--model", "a"]).model == "a"
    assert parse_flags(["a"]).model == "a"
    assert parse_flags([]).model is None


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["a", "--model", "b"], "twice"),
        (["--colour", "red"], "unknown argument `--colour`"),
        (["--port", "70000"], "no port"),
        (["--port", "x"], "--port"),
        (["--max-num-seqs", "0"], "below 1"),
        (["--limit-mm-per-prompt", "[1]"], "JSON object"),
        (["--limit-mm-per-prompt", "{"], "--limit-mm-per-prompt"),
        (["--allowed-origins", "*"], "--allowed-origins"),
        (["--dtype", "int4"], "--dtype"),
        (["--mm-processor-cache-type", "disk"], "--mm-processor-cache-type"),
        (["--mm-shm-cache-max-object-size-mb", "0"], "below 1"),
        (["--max-num", "3"], "unknown argument"),
        (["--api-key", ""], "a key needs"),
        (["--api-key", "a\u00e9"], "a key needs"),
        (["--disable-access-log-for-endpoints", "health"], "no path"),
        (["--seed", str(2**64)], "no seed"),
        *(
            ([flag, value], flag)
            for flag in (
                *("--shutdown-timeout", "--sse-keep-alive-interval", "--request-timeout"),
                *("--request-body-timeout", "--mm-processor-cache-gb"),
            )
            for value in ("-1", "nan", "inf", "soon")
        ),
    ],
)
def test_mistakes_end_with_a_message(
    argv: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(argv)
    assert caught.value.code == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize("flag", sorted(VLLM_FLAGS_WITHOUT_MEANING_YET))
def test_other_flags_of_vllm_are_refused_by_name(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in ([flag], [f"{flag}=1"]):
        with pytest.raises(SystemExit):
            parse_flags(argv)
        assert f"`{flag}` is a flag of vLLM's" in capsys.readouterr().err


def test_help_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    assert "--limit-mm-per-prompt" in capsys.readouterr().out


def test_a_setting_of_another_cache_is_refused(tiny_gemma3: Path) -> None:
    flags = parse_flags([str(tiny_gemma3), "--mm-shm-cache-max-object-size-mb", "32"])
    with pytest.raises(ConfigError, match="set it to shm"):
        to_engine_config(flags)


def test_limits_must_be_numbers(tiny_gemma3: Path) -> None:
    flags = parse_flags([str(tiny_gemma3), "--limit-mm-per-prompt", '{"image": "many"}'])
    with pytest.raises(ConfigError, match="many"):
        to_engine_config(flags)


def test_a_missing_model_is_named() -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        to_engine_config(parse_flags(["./no/such/model"]))
