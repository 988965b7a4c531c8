"""Clips over HTTP: files in base64 and from every kind of URL, in chats and responses."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mmjax.config.engine_config import MultiModalConfig
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.processing.media.encoded import EncodedAudio
from tests.families.qwen2_audio import write_files
from tests.processing.test_audio_file import KINDS, tones, write_audio
from tests.server.conftest import Server, servers
from tests.server.test_app import data_url
from tests.server.test_bad_input import error_of
from tests.server.test_videos import ask, site_of, user

CLIP = write_audio(tones(48_000, 0.4))
OTHER = write_audio(tones(48_000, 0.7))
URL = "audio_url.url"


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_url(data: bytes, kind: str = "wav") -> str:
    return f"data:audio/{kind};base64,{as_base64(data)}"


def audio(url: str | None = None, **fields: Any) -> dict[str, Any]:
    part = {"type": "audio_url", **fields}
    return part if url is None else {**part, "audio_url": {"url": url}}


def spoken(data: bytes | str, form: Any = "wav", **fields: Any) -> dict[str, Any]:
    """Return a part in OpenAI's form."""
    text = data if isinstance(data, str) else as_base64(data)
    return {"type": "input_audio", "input_audio": {"data": text, "format": form}, **fields}


@pytest.fixture(scope="module")
def hears(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a family that hears clips, of a second at most."""
    path = write_files(tmp_path_factory.mktemp("clips"))
    mm = MultiModalConfig(
        allow_private_media_addresses=True,
        allowed_local_media_path=path,
        limit_mm_per_prompt={"audio": 3},
    )
    config = load_model_config(str(path), max_model_len=1024, served_model_name="tiny", mm=mm)
    processor = InputProcessor(config)
    with servers(processor, processor) as make:
        yield make()
    processor.close()


def test_a_clip_is_the_same_from_everywhere(hears: Server) -> None:
    mm = hears.engine_client.input_processor.model_config.mm
    assert mm.allowed_local_media_path is not None
    file = mm.allowed_local_media_path / "clip.wav"
    file.write_bytes(CLIP)
    with site_of(CLIP) as address:
        parts = [
            spoken(CLIP),
            {"type": "input_audio", "input_audio": {"data": as_base64(CLIP)}},
            audio(as_url(CLIP)),
            {"type": "audio_url", "audio_url": as_url(CLIP)},
            audio(file.as_uri()),
            audio(f"{address}/clip.wav"),
        ]
        found = [ask(hears, part)[0] for part in parts]
    assert {one.modality for one in found} == {"audio"}
    assert len({one.mm_hash for one in found}) == 1
    assert {one.mm_position.length for one in found} == {10}


@pytest.mark.parametrize(("kind", "codec", "form", "_"), KINDS, ids=lambda value: str(value))
def test_every_format_is_heard(hears: Server, kind: str, codec: str, form: str, _: float) -> None:
    file = write_audio(tones(48_000, 0.4), kind=kind, codec=codec, form=form)
    (found,) = ask(hears, spoken(file, kind))
    assert 10 <= found.mm_position.length <= 12


def test_clips_stand_in_their_order_and_are_counted(hears: Server) -> None:
    response = hears.chat(**user(spoken(CLIP), spoken(OTHER), spoken(CLIP)))
    features = hears.supervisor.engine.added[-1].mm_features
    placed = sorted(features, key=lambda one: one.mm_position.offset)
    assert [one.mm_position.length for one in placed] == [10, 17, 10]
    details = response.json()["usage"]["prompt_tokens_details"]
    assert (details["audio_tokens"], details["image_tokens"]) == (37, 0)
    error = error_of(hears.chat(**user(*[spoken(CLIP)] * 4)))
    assert "At most 3 audio(s)" in error["message"]
    assert error["param"] == "messages[0].content[3]"


def test_responses_take_clips(hears: Server) -> None:
    content = [spoken(OTHER), {"type": "input_text", "text": "what?"}]
    given = [{"role": "user", "content": content}]
    response = hears.http.post("/v1/responses", json={"model": "tiny", "input": given})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["input_tokens_details"]["audio_tokens"] == 17
    (found,) = hears.supervisor.engine.added[-1].mm_features
    assert found.mm_hash == ask(hears, spoken(OTHER))[0].mm_hash
    bad = [{"role": "user", "content": [spoken(b"GIF89a" * 9)]}]
    error = error_of(hears.http.post("/v1/responses", json={"model": "tiny", "input": bad}), 422)
    assert error["param"] == "input[0].content[0].input_audio.data"


def test_a_clip_that_comes_again_is_not_decoded(
    hears: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_audio(tones(48_000, 0.3))
    (first,) = ask(hears, spoken(file, uuid="clip"))

    def refuse(self: EncodedAudio, rate: int) -> Any:
        raise AssertionError("decoded again")

    monkeypatch.setattr(EncodedAudio, "decode", refuse)
    (again,) = ask(hears, audio(as_url(file)))
    (known,) = ask(hears, {"type": "input_audio", "input_audio": None, "uuid": "clip"})
    assert first.mm_hash == again.mm_hash == known.mm_hash
    error = error_of(hears.chat(**user(audio(uuid="other", audio_url=None))))
    assert error["param"] == "messages[0].content[0].uuid"
    error = error_of(hears.chat(**user(spoken(OTHER, uuid="clip"))), 409)
    assert error["param"] == "messages[0].content[0].uuid"


DATA = "input_audio.data"
MISTAKES: list[tuple[dict[str, Any], str, int]] = [
    (audio("ftp://a/b"), URL, 400),
    (audio("data:audio/wav,AAAA"), URL, 400),
    (audio("file:///etc/passwd"), URL, 400),
    (audio("http://10.0.0.1:22/a"), URL, 400),
    (audio(as_url(b"GIF89a" * 9)), URL, 422),
    (audio(as_url(CLIP[:30])), URL, 422),
    (spoken(b"#EXTM3U\nfile:///etc/passwd\n"), DATA, 422),
    (spoken("A!A="), DATA, 422),
    (spoken(""), DATA, 422),
    (spoken(CLIP, 3), "input_audio.format", 400),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, DATA, 400),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "rate": 1}}, "input_audio.rate", 400),
    ({"type": "input_audio", "input_audio": "AAAA"}, "input_audio", 400),
    ({"type": "input_audio"}, "input_audio", 400),
    (audio(as_url(CLIP), detail="low"), "detail", 400),
    (audio(audio_url=3), "audio_url", 400),
    (audio(), "audio_url", 400),
    (audio(as_url(CLIP), text="a"), "text", 400),
]


@pytest.mark.parametrize(("part", "field", "status"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_named(hears: Server, part: dict[str, Any], field: str, status: int) -> None:
    error = error_of(hears.chat(**user(part)), status)
    assert error["param"] == f"messages[0].content[0].{field}"
    assert hears.engine_client.num_requests == 0


def test_lengths_that_the_model_does_not_hear(hears: Server) -> None:
    for seconds, message in (
        (1.01, "lasts 1.0 s, and the model hears 1 s"),
        (0.01, "no embedding"),
    ):
        error = error_of(hears.chat(**user(spoken(write_audio(tones(48_000, seconds))))))
        assert message in error["message"]


def test_more_than_a_server_takes(hears: Server) -> None:
    connector = hears.engine_client.input_processor.connector
    limits = connector._limits
    changes: list[tuple[dict[str, Any], str]] = [
        ({"max_audio_bytes": 1000}, "at most 1000 are"),
        ({"max_audio_seconds": 0}, "at most 0 s"),
        ({"max_audio_rate": 44_100}, "from 1 to 44100"),
        ({"max_audio_channels": 1}, "2 channels"),
        ({"max_audio_samples": 9}, "at most 9 are"),
    ]
    file = write_audio(tones(48_000, 0.35))
    try:
        for change, message in changes:
            connector._limits = replace(limits, **change)
            for part, field in ((spoken(file), DATA), (audio(as_url(file)), URL)):
                error = error_of(hears.chat(**user(part)))
                assert message in error["message"]
                assert error["param"] == f"messages[0].content[0].{field}"
    finally:
        connector._limits = limits


def test_pictures_are_refused_by_a_model_that_hears(hears: Server) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url()}}
    error = error_of(hears.chat(**user(picture)))
    assert "this model takes `audio`" in error["message"]
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    assert "takes no videos" in error_of(hears.chat(**user(video)))["message"]
    error = error_of(hears.chat(**user({"type": "what"})))
    assert "input_audio" in error["message"]
    assert "image_url" not in error["message"]


def test_what_the_server_says_of_itself(hears: Server) -> None:
    (model,) = hears.http.get("/v1/models").json()["data"]
    assert "audio" in str(model)
    ask(hears, spoken(write_audio(tones(48_000, 0.25))))
    metrics = hears.http.get("/metrics").text
    for stage in ("fetch", "decode", "process"):
        (line,) = [
            line
            for line in metrics.splitlines()
            if line.startswith(f"mmjax:image_{stage}_time_seconds_count")
        ]
        assert float(line.rpartition(" ")[2]) > 0
