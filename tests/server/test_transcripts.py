"""/v1/audio/transcriptions and translations: forms in, every form of a transcript out, errors.

The engine is scripted: `tests/models/test_whisper_transcripts.py` has what a model says.
"""

import asyncio
import io
import math
import re
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.server.openai.transcripts import service
from mmjax.server.openai.transcripts.room import Room
from tests.families.voxtral import VOXTRAL
from tests.families.whisper import RATE, WHISPER, write_files
from tests.server.conftest import MakeServer, Server, events_of, servers

ROUTE, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def write_wav(seconds: float, rate: int = RATE) -> bytes:
    """Return a file of a tone."""
    samples = (np.sin(np.arange(int(seconds * rate)) * 0.1) * 20_000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


WAV = write_wav(0.8)


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    config = load_model_config(str(WHISPER.path()), served_model_name="tiny", max_model_len=64)
    return InputProcessor(config)


@pytest.fixture
def make_whisper(processor: InputProcessor) -> Iterator[MakeServer]:
    """Return a function that starts a server of a Whisper, one at a time."""
    with servers(processor, processor) as make:
        yield make


@pytest.fixture
def server(make_whisper: MakeServer) -> Server:
    server = make_whisper()
    server.will_say("<|0.00|> the circle<|0.40|><|0.40|> is red<|0.70|>")
    return server


def post(server: Server, *, file: bytes = WAV, route: str = ROUTE, **fields: Any) -> Any:
    given = {"language": "en", **fields}
    data = {name: one for name, one in given.items() if one is not None}
    return server.http.post(route, data=data, files={"file": ("clip.wav", file)})


def error_of(response: Any, status: int = 400) -> tuple[str, str | None]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["message"], error["param"]


def test_json_and_text(server: Server):
    answer = post(server).json()
    usage = {"type": "duration", "seconds": 1}
    assert answer == {"text": "the circle is red", "usage": usage}
    response = post(server, response_format="text")
    assert response.text == "the circle is red\n"
    assert response.headers["content-type"].startswith("text/plain")


def test_subtitles(server: Server):
    assert post(server, response_format="srt").text == (
        "1\n00:00:00,000 --> 00:00:00,400\nthe circle\n\n2\n00:00:00,400 --> 00:00:00,700\nis red\n"
    )
    assert post(server, response_format="vtt").text == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:00.400\nthe circle\n"
        "\n00:00:00.400 --> 00:00:00.700\nis red\n"
    )


def test_verbose_json(server: Server):
    answer = post(server, response_format="verbose_json", temperature="0").json()
    assert (answer["task"], answer["language"], answer["duration"]) == (
        "transcribe",
        "english",
        0.8,
    )
    first, second = answer["segments"]
    assert (first["id"], first["start"], first["end"]) == (0, 0.0, 0.4)
    assert (second["id"], second["start"], second["end"]) == (1, 0.4, 0.7)
    assert [one["text"] for one in answer["segments"]] == [" the circle", " is red"]
    # The engine's tokens have -2 each, and silence -1.
    assert first["avg_logprob"] == -2.0
    assert [one["no_speech_prob"] for one in answer["segments"]] == [math.exp(-1)] * 2
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["segment"]}
    assert post(server, **fields).json() == answer


def test_a_stream_of_events(server: Server):
    response = post(server, stream="true")
    *deltas, whole = events_of(response)
    assert response.text.endswith("data: [DONE]\n\n")
    assert {one["type"] for one in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 2
    assert whole["type"] == "transcript.text.done"
    assert whole["text"] == "".join(one["delta"] for one in deltas) == "the circle is red"


def test_openais_client(server: Server):
    client = server.openai()
    clip = ("clip.wav", WAV)
    made = client.audio.transcriptions.create(model="tiny", file=clip, language="de")
    assert made.text == "the circle is red"
    verbose = client.audio.transcriptions.create(
        model="tiny",
        file=clip,
        language="de",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert verbose.language == "german"
    assert [one.text for one in verbose.segments or ()] == [" the circle", " is red"]
    stream = client.audio.transcriptions.create(
        model="tiny", file=clip, language="de", stream=True, temperature=0.0
    )
    *_, last = stream
    assert last.type == "transcript.text.done"
    with pytest.warns(DeprecationWarning, match="deprecated"):
        translation = client.audio.translations.create(
            model="tiny", file=clip, extra_body={"language": "de"}
        )
    assert translation.text == "the circle is red"


def sent(server: Server) -> Any:
    """Return the last request that the engine got."""
    return server.supervisor.engine.added[-1]


def test_what_the_engine_is_asked(server: Server):
    decode = server.engine_client.input_processor.tokenizer.decode
    begin = "<|startoftranscript|><|fr|>"
    post(server, language="French", prompt="the star", temperature="0.4", seed="5", top_k="3")
    assert decode(sent(server).prompt_token_ids) == (
        f"<|startofprev|> the star{begin}<|transcribe|><|notimestamps|>"
    )
    params = sent(server).sampling_params
    assert (params.temperature, params.seed, params.top_k) == (0.4, 5, 3)
    assert params.transcript.timestamps_from is None
    assert params.transcript.suppressed_token_ids[:3] == [5, 6, 7]
    post(server, language="fr", route=TRANSLATIONS, response_format="vtt")
    assert decode(sent(server).prompt_token_ids) == f"{begin}<|translate|>"
    assert decode([sent(server).sampling_params.transcript.timestamps_from]) == "<|0.00|>"
    assert sent(server).sampling_params.temperature == 0.0
    (feature,) = sent(server).mm_features
    assert feature.mm_position.length == 50


def test_a_control_token_in_a_prompt_is_mere_text(server: Server):
    post(server, prompt="<|startoftranscript|>")
    *before, start, _, _, _ = sent(server).prompt_token_ids
    assert start not in before
    assert len(before) > 10


def test_a_long_clip_has_a_request_for_each_window(server: Server):
    before = len(server.supervisor.engine.added)
    answer = post(server, file=write_wav(2.2), response_format="verbose_json").json()
    # A single timestamp ends each window: the next one begins a second later.
    # And one of each that asks how probable silence is.
    assert len(server.supervisor.engine.added) == before + 3 * 2
    assert [one["seek"] for one in answer["segments"]] == [0, 0, 100, 100, 200, 200]
    assert answer["text"] == " ".join(["the circle is red"] * 3)


def test_improbable_windows_are_transcribed_again(server: Server):
    """The engine's tokens have -2 each, and silence -1."""
    again: dict[str, Any] = {"temperature": "0.5", "logprob_threshold": "-1.9"}
    answer = post(server, response_format="verbose_json", **again).json()
    asked = [one.sampling_params for one in server.supervisor.engine.added]
    # How probable silence is it asks once.
    assert [one.prompt_logprobs for one in asked] == [None, 0, None, None, None]
    del asked[1]
    assert [one.temperature for one in asked] == [0.5, 0.6, 0.8, 1.0]
    assert {one["temperature"] for one in answer["segments"]} == {1.0}
    deltas = events_of(post(server, stream="true", **again))
    assert "".join(one.get("delta", "") for one in deltas) == answer["text"]
    silent = again | {"no_speech_threshold": "0.3"}
    assert post(server, **silent).json()["text"] == ""
    assert sent(server).sampling_params.prompt_logprobs == 0
    decode = server.engine_client.input_processor.tokenizer.decode
    assert decode(sent(server).prompt_token_ids) == "<|startoftranscript|><|nospeech|>"
    again["logprob_threshold"] = "-2.1"
    enough = post(server, **again, stream="true")
    assert enough.status_code == 200
    assert sent(server).sampling_params.temperature == 0.5


def test_a_language_is_found_out_first(make_whisper: MakeServer):
    server = make_whisper()
    server.will_say("<|fr|><|0.00|> the circle<|0.40|>")
    answer = post(server, language=None, response_format="verbose_json").json()
    asked, window, _ = server.supervisor.engine.added
    decode = server.engine_client.input_processor.tokenizer.decode
    assert decode(asked.prompt_token_ids) == "<|startoftranscript|>"
    assert decode(asked.sampling_params.allowed_token_ids) == "<|en|><|de|><|fr|>"
    assert decode(window.prompt_token_ids) == "<|startoftranscript|><|fr|><|transcribe|>"
    assert [one.identifier for one in asked.mm_features] == [
        one.identifier for one in window.mm_features
    ]
    assert answer["language"] == "french"


REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "language": (
        {"language": "klingon"},
        "is none of the model's; it knows de, en, fr",
        "language",
    ),
    "format": ({"response_format": "diarized_json"}, "json", "response_format"),
    "temperature": ({"temperature": "hot"}, "`temperature`", "temperature"),
    "hotter": ({"temperature": "1000"}, "less than or equal to 100", "temperature"),
    "words": (
        {"timestamp_granularities[]": "word"},
        "has no words' times; ask for verbose_json",
        "timestamp_granularities",
    ),
    "streamed words": (
        {"timestamp_granularities[]": "word", "stream": "true"},
        "words are not streamed",
        "timestamp_granularities",
    ),
    "included": ({"include[]": "logprobs"}, "not supported", "include"),
    "unknown": ({"hotwords": "a"}, "`hotwords` is not a field", "hotwords"),
    "silence": ({"no_speech_threshold": "0.6"}, "give both", "no_speech_threshold"),
    "ratio": ({"compression_ratio_threshold": "nan"}, "finite", "compression_ratio_threshold"),
    "streamed": ({"stream": "true", "response_format": "srt"}, "is not made of", "stream"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_field_is_named(server: Server, name: str):
    fields, text, param = REFUSED[name]
    message, named = error_of(post(server, **fields))
    assert text in message
    assert named == param


def test_words_without_heads_that_align(tmp_path: Path):
    path = write_files(tmp_path, alignment_heads=None)
    without = InputProcessor(load_model_config(str(path), served_model_name="tiny"))
    fields: dict[str, Any] = {
        "timestamp_granularities[]": "word",
        "response_format": "verbose_json",
    }
    with servers(without, without) as make:
        message, param = error_of(post(make(), **fields))
    assert "has no `alignment_heads`" in message
    assert param == "timestamp_granularities"


def test_a_wrong_model_and_a_wrong_body(server: Server):
    assert error_of(post(server, model="whisper-1"), 404)[1] == "model"
    assert "must be a form" in error_of(server.http.post(ROUTE, json={"file": "x"}))[0]
    missing = server.http.post(ROUTE, data={"model": "tiny"}, files={"clip": b"x"})
    assert error_of(missing) == ("`clip` is a file; the clip is `file`", "clip")
    text = server.http.post(ROUTE, files={"model": (None, "tiny")})
    assert error_of(text)[1] == "file"


def test_a_model_that_transcribes_nothing(make_server: MakeServer):
    message, param = error_of(post(make_server()))
    # It sees alone, so that a clip cannot be asked about either.
    assert message == "`tiny` does not transcribe; serve a Whisper, a Voxtral or a Qwen3-ASR"
    assert param == "model"


# ---- a Voxtral -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hearing_processor() -> InputProcessor:
    return InputProcessor(load_model_config(str(VOXTRAL.path()), served_model_name="tiny"))


@pytest.fixture
def voxtral(hearing_processor: InputProcessor) -> Iterator[Server]:
    with servers(hearing_processor, hearing_processor) as make:
        server = make()
        server.will_say("the circle is red</s>")
        yield server


def test_a_model_that_hears_all_of_a_clip(voxtral: Server):
    """Of a clip of three units: one request, and one segment."""
    file = write_wav(2.2)
    answer = post(voxtral, file=file, response_format="verbose_json", language="de").json()
    assert (answer["text"], answer["language"]) == ("the circle is red", "german")
    (segment,) = answer["segments"]
    assert (segment["start"], segment["end"]) == (0.0, 2.2)
    decode = voxtral.engine_client.input_processor.tokenizer.decode
    (request,) = voxtral.supervisor.engine.added
    clip = "[BEGIN_AUDIO]" + "[AUDIO]" * 30
    assert decode(request.prompt_token_ids) == f"<s>[INST]{clip}[/INST]lang:de[TRANSCRIBE]"
    answer = post(voxtral, file=file, response_format="verbose_json", language=None).json()
    assert "language" not in answer
    assert decode(sent(voxtral).prompt_token_ids).endswith("[/INST][TRANSCRIBE]")
    deltas = events_of(post(voxtral, file=file, stream="true"))
    assert "".join(one.get("delta", "") for one in deltas) == deltas[-1]["text"] == answer["text"]


def test_what_it_has_not_is_refused(voxtral: Server):
    assert error_of(post(voxtral, route=TRANSLATIONS))[1] == "model"
    assert error_of(post(voxtral, prompt="the star"))[1] == "prompt"
    assert error_of(post(voxtral, language="klingon"))[1] == "language"
    assert error_of(post(voxtral, logprob_threshold="-1"))[1] == "logprob_threshold"
    words: dict[str, Any] = {
        "timestamp_granularities[]": "word",
        "response_format": "verbose_json",
    }
    assert error_of(post(voxtral, **words))[1] == "timestamp_granularities"


def test_a_clip_that_the_context_does_not_hold_is_named(voxtral: Server):
    longest = voxtral.engine_client.input_processor.model_config.max_model_len
    message, param = error_of(post(voxtral, file=write_wav(longest / 10)))  # 10 tokens a second
    assert "max_model_len" in message
    assert param == "file"


# ---- threats -------------------------------------------------------------------------------------


def test_files_that_are_no_clips(server: Server):
    for file in (b"", b"RIFF", b"\x89PNG\r\n\x1a\n" + bytes(100), WAV[:30], b"<html>" * 50):
        response = post(server, file=file)
        assert response.status_code in (400, 422), response.text
        assert response.json()["error"]["param"] == "file"


def test_a_clip_that_is_too_long(make_whisper: MakeServer):
    server = make_whisper()
    rate = 8
    start = bytearray(write_wav(1.0))
    # A header of 8 samples a second makes an hour of few bytes.
    start[24:32] = rate.to_bytes(4, "little") + (2 * rate).to_bytes(4, "little")
    message, param = error_of(post(server, file=bytes(start)))
    assert re.search(r"lasts 2000.* at most 1800 s", message)
    assert param == "file"
    assert not server.supervisor.engine.added


def test_an_upload_that_is_too_large(make_whisper: MakeServer):
    server = make_whisper(max_request_bytes=20_000)
    response = post(server)
    assert response.status_code == 413
    assert not server.supervisor.engine.added


async def test_clips_wait_for_room():
    room = Room(100.0)
    first, second = await room.take(60.0), asyncio.create_task(room.take(50.0))
    third = asyncio.create_task(room.take(1000.0))
    await asyncio.sleep(0)
    assert not second.done()
    first.close()
    first.close()
    hold = await asyncio.wait_for(second, 5)
    await asyncio.sleep(0)
    assert not third.done()
    hold.close()
    (await asyncio.wait_for(third, 5)).close()


async def test_a_long_clip_is_not_overtaken_by_short_ones():
    room = Room(100.0)
    short = await room.take(60.0)
    long = asyncio.create_task(room.take(100.0))
    await asyncio.sleep(0)
    # As a client that comes while the one before is served.
    following = asyncio.create_task(room.take(40.0))
    await asyncio.sleep(0)
    assert not following.done()
    short.close()
    (await asyncio.wait_for(long, 5)).close()
    (await asyncio.wait_for(following, 5)).close()


async def test_whoever_leaves_the_queue_holds_up_nobody():
    room = Room(100.0)
    first, second = await room.take(60.0), asyncio.create_task(room.take(100.0))
    third = asyncio.create_task(room.take(40.0))
    await asyncio.sleep(0)
    second.cancel()
    (await asyncio.wait_for(third, 5)).close()
    first.close()


@pytest.mark.parametrize("fields", [{}, {"stream": "true"}, {"language": "no"}])
def test_room_is_given_back(
    make_whisper: MakeServer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
):
    monkeypatch.setattr(service, "MAX_SECONDS_AT_ONCE", 31)
    server = make_whisper()
    server.will_say("<|0.00|> red<|0.40|>")
    statuses = {post(server, **fields).status_code for _ in range(3)}
    assert statuses == {400 if "language" in fields else 200}


def test_keys_share_no_cache_of_clips(make_whisper: MakeServer):
    server = make_whisper(api_keys=("one", "two"))
    server.will_say("<|0.00|> red<|0.40|>")
    files = {"file": ("clip.wav", WAV)}
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        response = server.http.post(ROUTE, data={"language": "en"}, files=files, headers=headers)
        assert response.status_code == 200, response.text
    first, second = server.supervisor.engine.added
    assert first.cache_salt != second.cache_salt
    assert first.mm_features[0].identifier != second.mm_features[0].identifier
