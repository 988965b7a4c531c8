"""vLLM's flags mean here what they mean there, or are refused by name."""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmjax.config.engine_config import EngineConfig, MultiModalConfig, ParallelConfig, ServerConfig
from mmjax.config.refused_flags import HELD_FLAGS, REFUSED_FLAGS, refusal_of
from mmjax.errors import CheckpointError, ConfigError
from mmjax.llm.arguments import parse_keywords
from mmjax.server.flags import (
    _build_parser,
    check_alone,
    dump_config,
    parse_flags,
    parse_mapping,
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
    "--uds /run/s --ssl-keyfile /k --ssl-certfile /c --enable-log-requests --enable-log-outputs "
    "--max-log-len 5 --log-format json --max-num-queued-tokens 600 --download-dir /d "
    "--generation-config vllm --otlp-traces-endpoint http://c/v1/traces "
    "-tp 2 --distributed-coordinator h:1 --distributed-num-processes 2 "
    "--distributed-process-id 1"
).split()
JSON_FLAGS = [
    *("--limit-mm-per-prompt", '{"image": {"count": 2, "width": 64}, "video": 0}'),
    *("--mm-processor-kwargs", '{"do_pan_and_scan": true}'),
    *("--allowed-origins", '["https://example.com"]'),
    *("--override-generation-config", '{"temperature": 0.5}'),
    *("--chat-template", "{{ 1 }}"),
]

OF_VLLM = """
    --host --port --uds --api-key --allowed-origins --root-path --ssl-keyfile --ssl-certfile
    --middleware --disable-fastapi-docs --enable-offline-docs --enable-request-id-headers
    --uvicorn-log-level --disable-access-log-for-endpoints --h11-max-incomplete-event-size
    --h11-max-header-count --sse-keep-alive-interval --shutdown-timeout --enable-log-requests
    --enable-log-outputs --max-log-len --log-level --log-config-file --chat-template
    --chat-template-content-format --response-role --served-model-name --enable-auto-tool-choice
    --tool-call-parser --reasoning-parser
    --model --revision --tokenizer --dtype --seed --max-model-len --max-num-seqs
    --max-num-batched-tokens --max-num-queued-reqs --max-num-queued-tokens
    --gpu-memory-utilization --kv-cache-memory-bytes --kv-cache-dtype --block-size
    --tensor-parallel-size -tp --data-parallel-size --enable-prefix-caching
    --no-enable-prefix-caching --prefix-caching-hash-algo --enable-chunked-prefill --enforce-eager
    --generation-config --override-generation-config --structured-outputs-config --load-format
    --download-dir --trust-remote-code --use-tqdm-on-load --hf-overrides --watchdog-config
    --enable-fault-tolerance --quantization
    --limit-mm-per-prompt --mm-processor-cache-gb --mm-processor-cache-type
    --mm-shm-cache-max-object-size-mb --mm-hasher-algorithm --mm-processor-kwargs --media-io-kwargs
    --mm-encoder-tp-mode --mm-encoder-only --skip-mm-profiling --interleave-mm-strings
    --language-model-only --disable-chunked-mm-input --allowed-local-media-path
    --allowed-media-domains --renderer-num-workers --enable-mm-embeds
    --trust-request-chat-template --trust-request-mm-kwargs --enable-prompt-tokens-details
"""
"""vLLM 0.33's flags of its server, its engine and its media, and those of one model's parts."""


NAMES = """
    --allowed-origins --api-key --async-scheduling --no-async-scheduling --block-size
    --chat-template --compilation-cache-dir --compile-threads --disable-access-log-for-endpoints
    --disable-chunked-mm-input --distributed-coordinator --distributed-num-processes
    --distributed-process-id --dtype --enable-chunked-prefill --no-enable-chunked-prefill
    --enable-mm-embeds --enable-prefix-caching --no-enable-prefix-caching --encoder-cache-size
    --gpu-memory-utilization --help --host --kv-cache-memory-bytes --limit-mm-per-prompt --log-level
    --max-image-bytes --max-image-pixels --max-media-decode-bytes --max-media-request-decode-bytes
    --max-model-len --max-num-batched-tokens --max-num-encoder-input-tokens --max-num-queued-reqs
    --max-num-seqs --max-request-bytes --mm-hasher-algorithm --mm-processor-cache-gb
    --mm-processor-cache-type --mm-processor-kwargs --mm-shm-cache-max-object-size-mb --model --port
    --prefix-caching-hash-algo --renderer-num-workers --request-body-timeout --request-timeout
    --revision --root-path --scheduling-policy --seed --served-model-name --shutdown-timeout
    --sse-keep-alive-interval --tensor-parallel-size -tp --trust-media-ids
    --trust-request-chat-template --trust-request-mm-kwargs --use-tqdm-on-load --no-use-tqdm-on-load
    --uvicorn-log-level
"""
"""Flags that operators' scripts may hold: none of them goes."""


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
        tensor_parallel_size=2, coordinator_address="h:1", num_processes=2, process_id=1
    )
    assert config.compilation_cache_dir == Path("/cache")
    assert not config.use_tqdm
    assert config.log_format == "json"
    assert config.scheduler.max_num_queued_tokens == 600
    assert (config.model.download_dir, config.model.generation_config) == (Path("/d"), "vllm")
    assert config.model.override_generation_config == {"temperature": 0.5}


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
    assert (config.uds, config.max_log_len) == (Path("/run/s"), 5)
    assert (config.ssl_keyfile, config.ssl_certfile) == (Path("/k"), Path("/c"))
    assert config.enable_log_requests
    assert config.enable_log_outputs
    assert config.otlp_traces_endpoint == "http://c/v1/traces"


@pytest.mark.parametrize("name", NAMES.split())
def test_a_flag_stays(name: str) -> None:
    assert name in _build_parser()._option_string_actions


def test_what_is_not_said_has_the_configs_defaults(tiny_gemma3: Path) -> None:
    flags = parse_flags([str(tiny_gemma3)])
    assert to_server_config(flags) == ServerConfig()
    config = to_engine_config(flags)
    assert config == EngineConfig(model=config.model)
    assert config.model.mm == MultiModalConfig()


def test_access_lines_may_all_be_wanted() -> None:
    assert parse_flags([]).disable_access_log_for_endpoints == (
        *("/health", "/ready", "/ping"),
        "/metrics",
    )
    assert (
        parse_flags(["--disable-access-log-for-endpoints", ""]).disable_access_log_for_endpoints
        == ()
    )


def test_the_model_may_be_a_flag() -> None:
    assert parse_flags(["--model", "a"]).model == "a"
    assert parse_flags(["a"]).model == "a"
    assert parse_flags([]).model is None


SECONDS = "expected a number of at least 0"


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["a", "--model", "b"], "twice"),
        (["--colour", "red"], "unknown argument `--colour`; `--help` lists all"),
        (["a", "b"], "unknown argument `b`"),
        (["--max-num", "3"], "unknown argument `--max-num`; do you mean `--max-num-seqs`?"),
        (["--port", "70000"], "`--port` is 70000; expected an integer from 0 to 65535"),
        (["--port", "x"], "`--port` is 'x'; expected an integer from 0 to 65535"),
        (["--port"], "--port"),
        (["--max-num-seqs", "0"], "`--max-num-seqs` is 0; expected an integer of at least 1"),
        (["--max-num-seqs", "x"], "`--max-num-seqs` is 'x'; expected an integer of at least 1"),
        (["--max-num-seqs", "1.5"], "`--max-num-seqs` is '1.5'; expected an integer of at least 1"),
        *(
            (["--max-model-len", text], f"`--max-model-len` is '{text}'; expected an integer")
            for text in ("k", "4kk", "1.2345k", "nank", "0x1k", "4 k", "1e3")
        ),
        (["--max-num-seqs", "9" * 9999], "9'; expected an integer of at least 1"),
        (["--block-size", "24"], "`--block-size` is 24; expected a power of two"),
        (
            ["--gpu-memory-utilization", "1.5"],
            "`--gpu-memory-utilization` is 1.5; expected a number above 0 and of at most 1",
        ),
        (["--limit-mm-per-prompt", "[1]"], "JSON object"),
        (["--limit-mm-per-prompt", "{"], """`--limit-mm-per-prompt` is '{'; expected a mapping"""),
        (["--mm-processor-kwargs", "3"], """is 3; expected a mapping (JSON object), as in '{"do"""),
        (["--allowed-origins", "*"], "`--allowed-origins` is '*'; expected a list of texts, as in"),
        (["--allowed-origins", "[1]"], "`--allowed-origins` is [1]; expected a list of texts"),
        (["--dtype", "int4"], "`--dtype` is 'int4'; expected one of auto, float32, bfloat16"),
        (["--mm-processor-cache-type", "disk"], "'disk'; expected one of lru, shm, processor_only"),
        (["--mm-shm-cache-max-object-size-mb", "0"], "expected an integer of at least 1"),
        (["--api-key", ""], "`--api-key` is '***'; expected a key"),
        (["--api-key", "good", "a\u00e9"], "expected a key of printable ASCII characters"),
        (["--disable-access-log-for-endpoints", "health"], "expected paths that begin with /"),
        (["--compilation-cache-dir", ""], "`--compilation-cache-dir` is ''; expected a path"),
        (["--seed", str(2**64)], "expected an integer of 64 bits"),
        (["--distributed-process-id=-1"], "expected an integer of at least 0"),
        *(
            ([f"{flag}={value}"], f"`{flag}` is {shown}; {SECONDS}")
            for flag in (
                *("--shutdown-timeout", "--sse-keep-alive-interval", "--request-timeout"),
                *("--request-body-timeout", "--mm-processor-cache-gb"),
            )
            for value, shown in (
                *(("-1", "-1.0"), ("nan", "nan"), ("inf", "inf"), ("-inf", "-inf")),
                ("soon", "'soon'"),
            )
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


def test_a_wrong_key_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--api-key", "s\u00e9cret"])
    assert "cret" not in capsys.readouterr().err
    assert "secret" not in repr(to_server_config(parse_flags(["--api-key", "secret"])))


@pytest.mark.parametrize("flag", OF_VLLM.split())
def test_a_flag_of_vllm_is_a_setting_or_is_refused_with_a_reason(flag: str) -> None:
    is_setting = flag in _build_parser()._option_string_actions and flag not in HELD_FLAGS
    assert is_setting != (refusal_of(flag) is not None)


@pytest.mark.parametrize(
    "given", [(flag, value) for flag, values in HELD_FLAGS.items() for value in values or ("",)]
)
def test_a_flag_that_says_what_is_so_anyway_is_taken(
    given: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, value = given
    argv = [flag, value] if value else [flag]
    assert parse_flags([*argv, "m"]) == parse_flags(["m", *argv]) == parse_flags(["m"])
    if flag.startswith("--"):
        key = flag.removeprefix("--")
        assert parse_mapping({key: value or True}) == parse_mapping({})
        assert with_file(tmp_path, f"{key}: {value or 'true'}") == parse_flags([])
        assert parse_keywords(None, {key.replace("-", "_"): value or True}) == {"model": None}
        with pytest.raises(ConfigError, match="a flag of vLLM's that mmjax does not take"):
            parse_mapping({key: "other"})


@pytest.mark.parametrize("flag", sorted(REFUSED_FLAGS))
def test_what_a_refusal_names_instead_exists(flag: str) -> None:
    reason = REFUSED_FLAGS[flag]
    named = re.findall(r"`(--[a-z0-9-]+)", reason)
    assert set(named) <= _build_parser()._option_string_actions.keys()
    assert reason.strip() == reason
    assert not reason.endswith(".")


@pytest.mark.parametrize("flag", sorted(REFUSED_FLAGS))
def test_other_flags_of_vllm_are_refused_by_name(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in ([flag], [f"{flag}=other"]):
        with pytest.raises(SystemExit):
            parse_flags(argv)
        assert f"`{flag}` is a flag of vLLM's" in capsys.readouterr().err


def test_vllms_spelling_with_underscores() -> None:
    flags = parse_flags(["--max_num_seqs", "3", "--served_model_name=a_b", "--no_async_scheduling"])
    assert (flags.max_num_seqs, flags.served_model_name) == (3, ("a_b",))
    assert not flags.async_scheduling


def test_a_model_may_have_several_names(tmp_path: Path, tiny_gemma3: Path) -> None:
    for flags in (
        parse_flags(["--served-model-name", "a", "b/c", "--model", str(tiny_gemma3)]),
        with_file(tmp_path, "served-model-name: [a, b/c]", str(tiny_gemma3)),
        parse_mapping({"served_model_name": ["a", "b/c"], "model": str(tiny_gemma3)}),
    ):
        model = to_engine_config(flags).model
        assert (model.public_names, model.public_name) == (("a", "b/c"), "a")
    assert parse_keywords(None, {"served_model_name": "a"})["served_model_name"] == ("a",)
    with pytest.raises(ConfigError, match="expected names that are not empty"):
        parse_mapping({"served_model_name": ""})
    (tmp_path / "adapter_config.json").write_text("{}")
    adapters = [
        "--enable-lora",
        "--lora-modules",
        f"b={tmp_path}",
        "--served-model-name",
        "a",
        "b",
    ]
    with pytest.raises(ConfigError, match="an adapter 'b', as the model itself"):
        to_engine_config(parse_flags([str(tiny_gemma3), *adapters]))


@pytest.mark.parametrize(
    ("text", "number"),
    [("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1.001k", 1001), ("2G", 2**31), ("8", 8)],
)
def test_vllms_units_of_integers(text: str, number: int) -> None:
    assert parse_flags(["--max-model-len", text]).max_model_len == number
    assert parse_mapping({"max_model_len": text}).max_model_len == number


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


# ---- --config FILE.yaml --------------------------------------------------------------------------


def with_file(tmp_path: Path, text: str, *argv: str) -> argparse.Namespace:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    return parse_flags(["--config", str(file), *argv])


def test_a_file_holds_settings_in_either_spelling(tmp_path: Path) -> None:
    text = """
        model: of/the-file
        max-num-seqs: 3
        max_num_batched_tokens: 64
        dtype: float32
        mm-processor-cache-gb: 1e-1  # a text, by YAML 1.1
        request_timeout: 2
        enable-prefix-caching: false
        compilation-cache-dir: /cache
        limit-mm-per-prompt: {image: {count: 2, width: 64}, video: 0}
        mm-processor-kwargs: '{"do_pan_and_scan": true}'
        api-key: [a, b]
        allowed-origins: ["https://example.com"]
        disable-access-log-for-endpoints: /health,/x
        distributed-coordinator: null
    """
    flags = with_file(tmp_path, text)
    assert flags.model == "of/the-file"
    assert (flags.max_num_seqs, flags.max_num_batched_tokens, flags.dtype) == (3, 64, "float32")
    assert (flags.mm_processor_cache_gb, flags.request_timeout) == (0.1, 2.0)
    assert not flags.enable_prefix_caching
    assert flags.compilation_cache_dir == Path("/cache")
    assert flags.limit_mm_per_prompt == {"image": {"count": 2, "width": 64}, "video": 0}
    assert flags.mm_processor_kwargs == {"do_pan_and_scan": True}
    assert (flags.api_key, flags.allowed_origins) == (("a", "b"), ("https://example.com",))
    assert flags.disable_access_log_for_endpoints == ("/health", "/x")
    assert flags.distributed_coordinator is None
    assert flags.block_size == 32


def test_flags_count_more_than_the_file(tmp_path: Path) -> None:
    text = "{model: a, max-num-seqs: 3, seed: 4, trust-media-ids: true, async-scheduling: false}"
    argv = ("b", "--max-num-seqs", "5", "--no-trust-media-ids", "--async-scheduling")
    flags = with_file(tmp_path, text, *argv)
    assert (flags.model, flags.max_num_seqs, flags.seed) == ("b", 5, 4)
    assert not flags.trust_media_ids
    assert flags.async_scheduling
    assert with_file(tmp_path, text, "--model", "c").model == "c"


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert with_file(tmp_path, "# nothing yet\n") == parse_flags([])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("max-num-seqs: x", "`max-num-seqs` is 'x'; expected an integer of at least 1"),
        ("max_num_seqs: 0", "`max_num_seqs` is 0; expected an integer of at least 1"),
        ("max-num-seqs: true", "`max-num-seqs` is True; expected an integer"),
        ("max-num-seqs: [1]", "`max-num-seqs` is [1]; expected an integer"),
        ("enable-prefix-caching: 'on'", "`enable-prefix-caching` is 'on'; expected true or false"),
        ("limit-mm-per-prompt: 4", "`limit-mm-per-prompt` is 4; expected a mapping"),
        ("limit-mm-per-prompt: {1: 4}", "expected a mapping"),
        ("api-key: [1]", "expected a key"),
        ("request-timeout: .nan", "`request-timeout` is nan; expected a number of at least 0"),
        ("dtype: int4", "`dtype` is 'int4'; expected one of auto"),
        ("max-num-seq: 3", "unknown setting `max-num-seq`; do you mean `max_num_seqs`?"),
        ("colour: red", "unknown setting `colour`; docs/configuration.md lists all"),
        ("config: other.yaml", "unknown setting `config`"),
        ("kv_cache_dtype: fp8", "`kv_cache_dtype` is a flag of vLLM's"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "`max_num_seqs` is given twice"),
        ("seed: 1\nseed: 2", "`seed` is given twice"),
        ("[max-num-seqs]", "holds list; expected a mapping"),
        ("1: 2", "the key 1 is no name"),
        ("{", "not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_mistakes_in_a_file_are_named(
    text: str, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        with_file(tmp_path, text)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert match in error
    assert "settings.yaml: " in error


def test_a_missing_file_is_named(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--config", str(tmp_path / "missing.yaml")])
    assert "missing.yaml: the file cannot be read" in capsys.readouterr().err


# ---- --dump-config -------------------------------------------------------------------------------


def test_a_dump_says_each_value_and_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMJAX_API_KEY", "from-the-environment")
    file = tmp_path / "settings.yaml"
    file.write_text("{max-num-seqs: 3, seed: 4, limit-mm-per-prompt: {image: 2}}")
    dump = dump_config(["some/model", "--config", str(file), "--seed", "5"])
    lines = dump.splitlines()
    assert 'model: "some/model"  # flag --model' in lines
    assert f"max_num_seqs: 3  # file {file}" in lines
    assert "seed: 5  # flag --seed" in lines
    assert "port: 8000  # default" in lines
    assert "# quantization: none  (default)" in lines
    assert "# api_key: not shown  (environment MMJAX_API_KEY)" in lines
    assert "from-the-environment" not in dump


def test_a_dump_is_a_file_of_the_same_settings(tmp_path: Path) -> None:
    argv = [*ACCEPTED, *JSON_FLAGS]
    flags = parse_flags(["m", *argv])
    file = tmp_path / "dump.yaml"
    file.write_text(dump_config(["m", *argv]))
    again = parse_flags(["--config", str(file), "--api-key", "a", "b"])
    assert again == flags


def test_a_dump_says_what_the_checkpoint_decides(tiny_gemma3: Path) -> None:
    lines = dump_config([str(tiny_gemma3)]).splitlines()
    config = to_engine_config(parse_flags([str(tiny_gemma3)])).model
    assert f"# max_model_len: {config.max_model_len}  (the checkpoint's)" in lines
    assert f'# served_model_name: "{tiny_gemma3}"  (the checkpoint\'s)' in lines
    (generation,) = [line for line in lines if line.startswith("# generation_config: ")]
    assert generation.endswith("(the checkpoint's)")
    given = dump_config([str(tiny_gemma3), "--max-model-len", "32"]).splitlines()
    assert "max_model_len: 32  # flag --max-model-len" in given
    missing = dump_config(["some/model"]).splitlines()
    assert "# max_model_len: the checkpoint's, at most 8192  (default)" in missing


def test_the_flag_prints_it_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(["--max-num-seqs", "3", "--dump-config"])
    assert caught.value.code == 0
    assert "max_num_seqs: 3  # flag --max-num-seqs\n" in capsys.readouterr().out


def test_the_environment_counts_less_than_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMJAX_API_KEY", "secret")
    assert parse_flags([]).api_key == ("secret",)
    assert parse_flags(["--api-key", "other"]).api_key == ("other",)
    monkeypatch.setenv("MMJAX_API_KEY", "")
    assert parse_flags([]).api_key == ()


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--ssl-keyfile", "/k"], "`ssl_certfile` is missing"),
        (["--ssl-certfile", "/c"], "`ssl_keyfile` is missing"),
        (["--enable-log-outputs"], "without `enable_log_requests`"),
    ],
)
def test_halves_are_refused(argv: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        to_server_config(parse_flags(argv))


# ---- what needs no checkpoint --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("--max-num-seqs 8 --max-num-batched-tokens 4", "below `max_num_seqs`"),
        ("--kv-offload-gb 1 --no-enable-prefix-caching", "`enable_prefix_caching` is off"),
        ("--kv-offload-dir /tmp/x", "`kv_offload_gb` is 0"),
        ("--max-loras 2", "without `enable_lora`"),
        ("--encoder-cache-dir /dev/null/x", "cannot be a cache's directory"),
        ("--kv-offload-gb 1 --kv-offload-dir /dev/null/x", "cannot be a cache's directory"),
    ],
)
def test_what_is_wrong_of_any_checkpoint_is_refused_without_one(argv: str, reason: str) -> None:
    flags = parse_flags(["/no/such/model", *argv.split()])
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check_alone(flags)


def test_such_a_flag_ends_a_server_before_its_engine_process_is_started() -> None:
    argv = ["--port", "0", "--max-num-seqs", "8", "--max-num-batched-tokens", "4"]
    command = [sys.executable, "-m", "mmjax.serve", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("mmjax.serve: `max_num_batched_tokens` is 4, below")
