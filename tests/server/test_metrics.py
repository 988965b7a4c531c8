"""`/metrics`: vLLM's names and our own, true figures, and a size that no client changes."""

import asyncio
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mmjax.config.engine_config import LoRAConfig
from mmjax.errors import EngineUnavailableError
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.params.sampling_params import SamplingParams
from mmjax.server.metrics import STATUSES
from mmjax.transport.messages import (
    MEMORY_CAUSES,
    STEP_TOKEN_BOUNDS,
    Heartbeat,
    Ready,
    RequestOutputDelta,
    StepOutput,
)
from tests.echo_engine import EchoSupervisor
from tests.server.conftest import MakeServer, Server, http_scope
from tests.test_serve import image_message

BOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
MAX_SERIES = 335

OF_VLLM = """
    num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
    prefix_cache_hits_total mm_cache_queries_total mm_cache_hits_total num_preemptions_total
    spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
    spec_decode_num_accepted_tokens_total
    prompt_tokens_total prompt_tokens_cached_total generation_tokens_total request_success_total
    iteration_tokens_total_bucket time_to_first_token_seconds_bucket
    inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket
    e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
    request_inference_time_seconds_bucket request_prefill_time_seconds_bucket
    request_decode_time_seconds_bucket request_prompt_tokens_bucket
    request_generation_tokens_bucket request_params_n_bucket request_params_max_tokens_bucket
    request_max_num_generation_tokens_bucket request_prefill_kv_computed_tokens_bucket
    cache_config_info
"""
OURS = """
    image_fetch_time_seconds_bucket image_decode_time_seconds_bucket
    image_process_time_seconds_bucket image_encode_time_seconds_bucket
    request_tokenize_time_seconds_bucket encoder_cache_queries_total encoder_cache_hits_total
    encoder_cache_usage_perc processor_cache_bytes compilations_total programs programs_left
    engine_restarts_total engine_up engine_state event_loop_lag_seconds_bucket
    encoder_disk_queries_total encoder_disk_hits_total encoder_disk_read_bytes_total
    encoder_disk_written_bytes_total encoder_workers_items_total encoder_workers_bytes_total
    encoder_workers_wait_seconds_total encoder_workers_refused_total
    encoder_workers_retries_total encoder_workers_fallbacks_total encoder_workers_alive
    num_requests_processing http_responses_total engine_resident_memory_bytes
    kv_offload_queries_total kv_offload_hits_total kv_offload_copied_bytes_total
    kv_offload_restored_bytes_total kv_offload_copied_seconds_total
    kv_offload_restored_seconds_total kv_files_hits_total kv_files_misses_total
    kv_files_read_bytes_total kv_files_written_bytes_total
"""
BUSY = Heartbeat(
    num_running=3,
    num_waiting=2,
    kv_cache_usage=0.25,
    num_compilations=1,
    num_programs_left=4,
    prefix_cache_hits=5,
    prefix_cache_queries=50,
    encoder_cache_hits=1,
    encoder_cache_queries=2,
    encoder_cache_usage=0.5,
    num_preemptions=6,
    num_drafts=3,
    num_draft_tokens=11,
    num_accepted_tokens=8,
    num_step_tokens=71,
    step_token_counts=[1, 0, 0, 2] + [0] * (len(STEP_TOKEN_BOUNDS) - 3),
    running_loras=["poet", "boxed"],
    waiting_loras=["sql"],
    memory_bytes={"weights": 40, "kv_cache": 30, "rest": 500},
)


@pytest.fixture
def busy(make_server: MakeServer) -> Server:
    server = make_server()
    server.supervisor.heartbeat = BUSY
    server.supervisor.ready = Ready(num_kv_blocks=99, block_size=32, num_programs=7)
    return server


def samples(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every series' value, by name and labels."""
    response = server.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(server: Server, name: str, **labels: str) -> float:
    """Return the value of the one series with these labels, besides the model's name."""
    found = [
        number
        for (one, given), number in samples(server).items()
        if one == name and labels.items() <= dict(given).items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_every_name_is_there(busy: Server) -> None:
    names = {name for name, _ in samples(busy)}
    wanted = {f"vllm:{one}" for one in OF_VLLM.split()} | {f"mmjax:{one}" for one in OURS.split()}
    assert wanted - names == set()


def test_the_board_asks_for_what_there_is(busy: Server) -> None:
    names = {name for name, _ in samples(busy)}
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [one["query"] for one in board["templating"]["list"]]
    found = {name for text in asked for name in re.findall(r"(?:vllm|mmjax|process)[:_]\w+", text)}
    assert len(found) > 20
    assert found - names == set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_adapters_are_labels_of_one_series(make_server: MakeServer, busy: Server) -> None:
    name = "vllm:lora_requests_info"
    assert name not in {one for one, _ in samples(busy)}, "without adapters"
    server = make_server(lora=LoRAConfig(enable_lora=True, max_loras=7))
    server.supervisor.heartbeat = BUSY
    found = [
        (dict(labels), value) for (one, labels), value in samples(server).items() if one == name
    ]
    ((labels, at),) = found
    assert labels == {
        "model_name": "tiny",
        "max_lora": "7",
        "running_lora_adapters": "boxed,poet",
        "waiting_lora_adapters": "sql",
    }
    assert abs(at - time.time()) < 60


def test_the_engines_memory_is_told_by_cause(busy: Server) -> None:
    name = "mmjax:engine_resident_memory_bytes"
    told = {
        dict(labels)["cause"]: value
        for (one, labels), value in samples(busy).items()
        if one == name
    }
    assert told == {**dict.fromkeys(MEMORY_CAUSES, 0), "weights": 40, "kv_cache": 30, "rest": 500}
    assert BUSY.memory_bytes.keys() <= set(MEMORY_CAUSES)
    busy.supervisor.heartbeat = msgspec.structs.replace(BUSY, memory_bytes={})
    assert name not in {one for one, _ in samples(busy)}, "a system that does not tell it"


def test_the_engines_figures(busy: Server) -> None:
    assert value(busy, "vllm:num_requests_running", model_name="tiny") == 3
    assert value(busy, "vllm:num_requests_waiting") == 2
    assert value(busy, "vllm:kv_cache_usage_perc") == 0.25
    assert value(busy, "vllm:num_preemptions_total") == 6
    assert value(busy, "vllm:spec_decode_num_drafts_total") == 3
    assert value(busy, "vllm:spec_decode_num_draft_tokens_total") == 11
    assert value(busy, "vllm:spec_decode_num_accepted_tokens_total") == 8
    assert value(busy, "mmjax:programs_left") == 4
    assert value(busy, "mmjax:encoder_cache_usage_perc") == 0.5
    assert value(busy, "vllm:cache_config_info", num_gpu_blocks="99", block_size="32") == 1
    assert value(busy, "vllm:iteration_tokens_total_bucket", le="32.0") == 1
    assert value(busy, "vllm:iteration_tokens_total_bucket", le="64.0") == 3
    assert value(busy, "vllm:iteration_tokens_total_bucket", le="+Inf") == 3
    assert value(busy, "vllm:iteration_tokens_total_sum") == 71


def test_a_restart_takes_nothing_away(busy: Server) -> None:
    assert value(busy, "vllm:prefix_cache_queries_total") == 50
    busy.supervisor.heartbeat = None
    busy.supervisor.num_restarts = 1
    assert value(busy, "vllm:prefix_cache_queries_total") == 50
    assert value(busy, "mmjax:engine_restarts_total") == 1
    busy.supervisor.heartbeat = BUSY
    assert value(busy, "vllm:prefix_cache_queries_total") == 100
    assert value(busy, "vllm:iteration_tokens_total_sum") == 142


def test_requests_are_counted_as_they_are(server: Server) -> None:
    assert server.chat(max_tokens=4, ignore_eos=True).status_code == 200
    usage = server.chat(max_tokens=3, n=2, ignore_eos=True).json()["usage"]
    assert value(server, "vllm:prompt_tokens_total") == 2 * usage["prompt_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert value(server, "vllm:prompt_tokens_cached_total") == 2 * cached > 0
    assert value(server, "vllm:generation_tokens_total") == 4 + 2 * 3
    assert value(server, "vllm:request_success_total", finished_reason="length") == 3
    assert value(server, "vllm:request_success_total", finished_reason="stop") == 0
    assert value(server, "vllm:time_to_first_token_seconds_count") == 3
    assert value(server, "vllm:inter_token_latency_seconds_count") == 3 + 2 * 2
    assert value(server, "vllm:e2e_request_latency_seconds_count") == 3
    assert value(server, "vllm:request_params_n_sum") == 3
    assert value(server, "vllm:request_params_max_tokens_sum") == 4 + 3
    assert value(server, "vllm:request_generation_tokens_sum") == 4 + 2 * 3
    assert value(server, "vllm:request_max_num_generation_tokens_sum") == 4 + 3
    assert value(server, "vllm:request_max_num_generation_tokens_count") == 2
    computed = 3 * usage["prompt_tokens"] - 3 * cached
    assert value(server, "vllm:request_prefill_kv_computed_tokens_sum") == computed
    assert value(server, "mmjax:request_tokenize_time_seconds_count") >= 2
    assert value(server, "mmjax:image_decode_time_seconds_count") == 0
    e2e = value(server, "vllm:e2e_request_latency_seconds_sum")
    assert 0 < value(server, "vllm:time_to_first_token_seconds_sum") <= e2e


def test_images_have_times_and_look_ups(server: Server) -> None:
    before = value(server, "vllm:mm_cache_queries_total")
    for _ in range(2):
        answer = server.chat(messages=[image_message(3)], max_tokens=2)
        assert answer.status_code == 200, answer.text
    assert value(server, "vllm:mm_cache_queries_total") - before == 2
    assert value(server, "vllm:mm_cache_hits_total") >= 1
    assert value(server, "mmjax:processor_cache_bytes") > 0
    for stage in ("fetch", "process"):
        assert value(server, f"mmjax:image_{stage}_time_seconds_count") >= 1


def test_what_is_aborted_or_fails_is_counted(make_server: MakeServer) -> None:
    server = make_server(supervisor=EchoSupervisor(delay_s=3600))
    client = server.engine_client

    async def begin_and_leave() -> None:
        stream = await client.add_request(
            GenerateRequest("a", "a red circle", SamplingParams(max_tokens=2, n=2))
        )
        stream.close()
        params = SamplingParams(max_tokens=2, n=3)
        other = await client.add_request(GenerateRequest("b", "a red circle", params))
        # One has finished before.
        delta = RequestOutputDelta(request_id="b-1", new_token_ids=[5], finish_reason="length")
        client.on_message(StepOutput(deltas=[delta]))
        server.supervisor.die(restarts=False)
        with pytest.raises(EngineUnavailableError):
            [_ async for _ in other]

    assert server.http.portal is not None
    server.http.portal.call(begin_and_leave)
    for reason, number in {"abort": 2, "length": 1, "error": 2}.items():
        assert value(server, "vllm:request_success_total", finished_reason=reason) == number
    assert value(server, "mmjax:engine_up") == 0


def test_a_late_loop_shows(server: Server) -> None:
    async def block() -> None:
        await asyncio.sleep(0)
        time.sleep(0.2)

    assert server.http.portal is not None
    while value(server, "mmjax:event_loop_lag_seconds_sum") < 0.09:
        server.http.portal.call(block)


# ---- PYSEC-2026-4325: labels that clients choose -------------------------------------------------


def test_PYSEC_2026_4325_random_methods_and_paths_change_no_size(busy: Server) -> None:
    draw = random.Random(0)
    busy.http.get("/no/such/path")
    before = {key for key, _ in samples(busy).items()}
    assert len(before) <= MAX_SERIES

    async def send_all() -> None:
        for _ in range(1000):
            await ask(draw.randbytes(8).hex().upper(), f"/{draw.randbytes(12).hex()}")

    async def ask(method: str, path: str) -> None:
        scope = http_scope(path, method=method, **{"x-request-id": path[1:]})

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            pass

        await busy.app(scope, receive, send)

    assert busy.http.portal is not None
    busy.http.portal.call(send_all)
    after = samples(busy)
    assert after.keys() == before
    assert after["mmjax:http_responses_total", frozenset({("status", "404")})] >= 1000


def test_no_response_has_a_status_without_a_name(server: Server) -> None:
    server.http.get("/no/such/path")
    server.chat(messages=3)
    assert value(server, "mmjax:http_responses_total", status="other") == 0
    assert value(server, "mmjax:http_responses_total", status="404") == 1
    assert value(server, "mmjax:http_responses_total", status="400") == 1
    assert len(STATUSES) == len(set(STATUSES))
