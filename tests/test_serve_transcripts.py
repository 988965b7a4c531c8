"""A clip's transcript over HTTP, in two processes, is `LLM.transcribe`'s in one."""

import io
import os
import signal
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from mmjax import LLM
from mmjax.processing.transcripts import name_language
from tests.families.whisper import RATE, WHISPER
from tests.test_serve import Served

ENGINE = r"started the engine process \(pid (\d+)\)"


def write_wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((samples * 32768).astype("<i2").tobytes())
    return file.getvalue()


# By default tests/chaos/test_kills.py kills the engine process among requests, as windows are.
@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_both_say_the_same(tmp_path: Path, *, is_killed: bool):
    path = WHISPER.write(tmp_path)
    tones = np.sin(np.arange(int(2.6 * RATE)) * 0.2) * np.linspace(0.1, 0.9, int(2.6 * RATE))
    samples = (tones * 32768).astype("<i2").astype(np.float32) / 32768
    flags = ("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--precompile", "none")
    with LLM(path, max_num_seqs=2, max_num_batched_tokens=64) as llm:
        expected = llm.transcribe(samples, has_word_times=True)
    server = Served(str(path), *flags, "--served-model-name", "tiny")
    try:
        found = server.wait_for(r"mmjax serving tiny at (http://127\.0\.0\.1:\d+)\n")
        clip: Any = ("clip.wav", write_wav(samples))
        with OpenAI(base_url=f"{found.group(1)}/v1", api_key="none", max_retries=0) as client:
            create = client.audio.transcriptions.create
            timed: Any = {
                "model": "tiny",
                "response_format": "verbose_json",
                "timestamp_granularities": ["segment", "word"],
            }
            whole: Any = create(**timed, file=clip)
            with create(model="tiny", file=clip, stream=True) as events:
                *_, last = events
            if is_killed:
                # Twelve windows, each of two requests: the engine process dies among them.
                long: Any = ("clip.wav", write_wav(np.tile(samples, 5)[: 12 * RATE]))
                undisturbed: Any = create(**timed, file=long)
                assert len(undisturbed.words or ()) > len(whole.words or ())
                with ThreadPoolExecutor(1) as pool:
                    disturbed = pool.submit(create, **timed, file=long)
                    time.sleep(0.3)
                    assert not disturbed.done()
                    os.kill(int(server.wait_for(ENGINE).group(1)), signal.SIGKILL)
                    replayed: Any = disturbed.result()
                    assert replayed.words == undisturbed.words
    finally:
        server.end()
    assert [one.tokens for one in whole.segments or ()] == [
        list(segment.token_ids) for segment in expected.segments
    ]
    words = [(one.word, one.start, one.end) for one in whole.words or ()]
    assert words == [tuple(one) for one in expected.find_words()]
    assert len({start for _, start, _ in words}) > 3
    assert whole.language == name_language(expected.language or "")
    assert last.type == "transcript.text.done"
    assert whole.text == last.text == expected.text
    assert len({segment.seek for segment in expected.segments}) > 1
