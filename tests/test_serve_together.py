"""`python -m mmjax.serve` in two processes, as two hosts would run it: one answers, one follows."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from mmjax import LLM, SamplingParams, serve
from mmjax.config.engine_config import EngineConfig
from mmjax.engine.device.mesh import settings_digest
from tests.kit import draw
from tests.test_serve import SMALL, Served, ask, image_message

SETTINGS = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64}


def serve_together(
    checkpoint: Path, *, more: tuple[str, ...] = (), second: tuple[str, ...] = ()
) -> tuple[Served, Served]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    flags = (
        *(str(checkpoint), *SMALL, *more, "--tensor-parallel-size", "2"),
        *("--distributed-coordinator", f"127.0.0.1:{port}", "--distributed-num-processes", "2"),
    )
    return Served(*flags), Served(*flags, "--distributed-process-id", "1", *second)


CROPS = ("--mm-processor-kwargs", '{"do_pan_and_scan": true, "pan_and_scan_max_num_crops": 8}')


class _StartedError(Exception):
    """In the place of a start: what `serve` would have started is known by then."""


def test_leader_and_follower_start_with_the_same_settings(
    tiny_gemma3: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else they refuse each other, whatever the operator gives to both."""
    configs: list[EngineConfig] = []

    def note(config: EngineConfig) -> None:
        configs.append(config)
        raise _StartedError

    class Spawned:
        def __init__(self, **_: Any) -> None: ...

        def configure(self, config: EngineConfig) -> None:
            note(config)

        async def close(self) -> None: ...

        pid = 0

    monkeypatch.setattr("mmjax.frontend.engine_client.supervisor.Supervisor", Spawned)
    monkeypatch.setattr("mmjax.engine.process.follow_engine", note)
    flags = [str(tiny_gemma3), *SMALL, *CROPS, "--tensor-parallel-size", "2", "--port", "0"]
    flags += ["--distributed-coordinator", "127.0.0.1:1", "--distributed-num-processes", "2"]
    for process_id in ("0", "1"):
        with pytest.raises(_StartedError):
            serve.main([*flags, "--distributed-process-id", process_id])
    leader, follower = configs
    assert leader.scheduler.max_num_encoder_input_tokens is not None, "the processor was asked"
    assert settings_digest(leader) == settings_digest(follower)


@pytest.mark.slow
def test_two_processes_serve_as_one_device(tiny_gemma3: Path):
    first, second = serve_together(tiny_gemma3, more=CROPS)
    try:
        url = first.wait_for(r"mmjax serving tiny at (http://127\.0\.0\.1:\d+)\n").group(1)
        answers = [ask(url, seed).choices[0].message.content for seed in range(3)]
        assert "process 1 of 2 follows" in second.output
        assert "mmjax serving" not in second.output
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0, first.output
        assert second.process.wait(60) == 0, second.output
    finally:
        first.end()
        second.end()
    kwargs = json.loads(CROPS[1])
    with LLM(
        str(tiny_gemma3),
        **SETTINGS,
        mm_processor_kwargs=kwargs,
        use_tqdm_on_load=False,
    ) as alone:
        greedy = SamplingParams(temperature=0.0, max_tokens=8)
        outputs = alone.chat([[image_message(seed)] for seed in range(3)], greedy, use_tqdm=False)
    assert answers == [output.outputs[0].text for output in outputs]


@pytest.mark.slow
def test_processes_that_disagree_do_not_start(tiny_gemma3: Path):
    both = serve_together(tiny_gemma3, second=("--max-num-seqs", "1"))
    try:
        for one in both:
            assert one.process.wait(120) == 1, one.output
            assert "have other settings than process 0" in one.output
    finally:
        for one in both:
            one.end()


@pytest.mark.slow
def test_one_process_spreads_over_its_devices(tiny_gemma3: Path):
    prompt = {"prompt": "<start_of_image> a", "multi_modal_data": {"image": draw(30, 20, 1)}}
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    texts = []
    for size in (1, 2):
        with LLM(
            str(tiny_gemma3),
            **SETTINGS,
            tensor_parallel_size=size,
            use_tqdm_on_load=False,
        ) as llm:
            texts.append(llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].text)
            assert llm.engine.compilations == 0
    assert texts[0] == texts[1]
