"""Videos over HTTP: files and frames, from every kind of URL, for the families that take them."""

import base64
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmjax.config.engine_config import MultiModalConfig
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.processing.media.encoded import EncodedVideo
from tests.families.directories import edit_golden
from tests.families.internvl import write_original as write_internvl_original
from tests.families.qwen2_vl import QWEN2_5
from tests.families.qwen3_vl import write_files
from tests.processing.test_video_file import VIDEO, write_video
from tests.server.conftest import Server, servers
from tests.server.test_app import data_url
from tests.server.test_bad_input import error_of


def without_template(path: Path) -> Path:
    """Leave the family its own chat template."""
    (path / "chat_template.jinja").unlink(missing_ok=True)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "Qwen2-VL": lambda folder: without_template(edit_golden("qwen2_vl", folder)),
    "Qwen2.5-VL": lambda folder: without_template(edit_golden("qwen2_vl", folder, config=QWEN2_5)),
    "Qwen3-VL": lambda folder: without_template(write_files("qwen3_vl", folder)),
    "InternVL": lambda folder: without_template(edit_golden("internvl", folder)),
    "InternVL, original": write_internvl_original,
}
URL = "video_url.url"


def as_url(data: bytes, kind: str = "mp4") -> str:
    return f"data:video/{kind};base64,{base64.b64encode(data).decode()}"


def as_frames(*images: Image.Image) -> str:
    files = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG")
        files.append(base64.b64encode(buffer.getvalue()).decode())
    return "data:video/jpeg;base64," + ",".join(files)


def video(url: str | None = None, **fields: Any) -> dict[str, Any]:
    part = {"type": "video_url", **fields}
    return part if url is None else {**part, "video_url": {"url": url}}


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]}


@contextmanager
def site_of(body: bytes) -> Iterator[str]:
    """Serve a file at any path of an address."""

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()
        thread.join()


def ask(server: Server, *parts: Any, **fields: Any) -> list[Any]:
    """Return the features that the engine got for an answered chat."""
    response = server.chat(**user(*parts), max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    return server.supervisor.engine.added[-1].mm_features


@pytest.fixture(scope="module", params=WRITERS)
def takes_videos(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of a family that takes videos, with its clients' kwargs trusted."""
    path = WRITERS[request.param](tmp_path_factory.mktemp("videos"))
    config = load_model_config(
        str(path),
        max_model_len=4096,
        served_model_name="tiny",
        mm=MultiModalConfig(
            trust_request_mm_kwargs=True,
            allow_private_media_addresses=True,
            allowed_local_media_path=path,
            media_io_kwargs={"video": {"num_frames": 4}},
        ),
    )
    processor = InputProcessor(config)
    with servers(processor, processor) as make:
        yield make()
    processor.close()


def test_a_file_and_frames_are_videos(takes_videos: Server) -> None:
    (whole,) = ask(takes_videos, video(as_url(VIDEO)))
    assert whole.modality == "video"
    (fewer,) = ask(takes_videos, video(as_url(VIDEO)), media_io_kwargs={"video": {"num_frames": 2}})
    assert fewer.mm_position.length < whole.mm_position.length
    images = [Image.new("RGB", (64, 48), (shade, 0, 0)) for shade in (10, 90, 200, 250)]
    (frames,) = ask(takes_videos, video(as_frames(*images)))
    assert frames.mm_position.length == whole.mm_position.length
    assert len({one.mm_hash for one in (whole, fewer, frames)}) == 3
    (webm,) = ask(takes_videos, video(as_url(write_video(kind="webm", codec="libvpx"), "webm")))
    assert webm.mm_position.length == whole.mm_position.length


def test_pictures_and_videos_stand_in_their_order(takes_videos: Server) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url()}}
    features = ask(takes_videos, video(as_url(VIDEO)), picture, video(as_url(write_video(9))))
    placed = sorted(features, key=lambda one: one.mm_position.offset)
    assert [one.modality for one in placed] == ["video", "image", "video"]
    assert placed[0].mm_hash != placed[2].mm_hash


def test_tokens_of_videos_are_counted_apart(takes_videos: Server) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url()}}
    response = takes_videos.chat(**user(video(as_url(VIDEO)), picture))
    details = response.json()["usage"]["prompt_tokens_details"]
    features = takes_videos.supervisor.engine.added[-1].mm_features
    numbers = {one.modality: one.mm_position.get_num_embeds() for one in features}
    assert numbers["video"] > 0
    assert (details["image_tokens"], details["video_tokens"]) == (
        numbers["image"],
        numbers["video"],
    )


def test_a_video_that_comes_again_is_not_decoded(
    takes_videos: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = as_url(write_video(11))
    (first,) = ask(takes_videos, video(url, uuid="clip"))

    def refuse(self: EncodedVideo) -> Any:
        raise AssertionError("decoded again")

    monkeypatch.setattr(EncodedVideo, "decode", refuse)
    (again,) = ask(takes_videos, video(url))
    (known,) = ask(takes_videos, video(uuid="clip", video_url=None))
    assert first.mm_hash == again.mm_hash == known.mm_hash
    error = error_of(takes_videos.chat(**user(video(uuid="other", video_url=None))))
    assert error["param"] == "messages[0].content[0].uuid"


def test_videos_are_fetched_and_read(takes_videos: Server) -> None:
    config = takes_videos.engine_client.input_processor.model_config
    assert config.mm.allowed_local_media_path is not None
    file = config.mm.allowed_local_media_path / "clip.mp4"
    file.write_bytes(VIDEO)
    (read,) = ask(takes_videos, video(file.as_uri()))
    with site_of(VIDEO) as address:
        (fetched,) = ask(takes_videos, video(f"{address}/clip.mp4"))
    (sent,) = ask(takes_videos, video(as_url(VIDEO)))
    assert read.mm_hash == fetched.mm_hash == sent.mm_hash


MISTAKES: list[tuple[dict[str, Any], str, int]] = [
    (video("ftp://a/b"), URL, 400),
    (video("data:video/mp4,AAAA"), URL, 400),
    (video(as_url(b"GIF89a" * 9)), URL, 422),
    (video(as_url(VIDEO[:200])), URL, 422),
    (video("data:video/jpeg;base64,AAAA,AAAA"), URL, 422),
    (video("data:video/jpeg;base64,"), URL, 422),
    (video("data:video/jpeg;base64," + "AAAA," * 5000), URL, 400),
    (video(as_frames(Image.new("RGB", (8, 8)), Image.new("RGB", (9, 8)))), URL, 400),
    (video(as_url(VIDEO), detail="low"), "detail", 400),
    (video(video_url={"url": as_url(VIDEO), "fps": 2}), "video_url.fps", 400),
    (video(video_url=3), "video_url", 400),
    (video(), "video_url", 400),
    (video(as_url(VIDEO), text="a"), "text", 400),
]


@pytest.mark.parametrize(("part", "field", "status"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_named(
    takes_videos: Server, part: dict[str, Any], field: str, status: int
) -> None:
    error = error_of(takes_videos.chat(**user(part)), status)
    assert error["param"] == f"messages[0].content[0].{field}"
    assert takes_videos.engine_client.num_requests == 0


def test_more_frames_than_a_server_takes(takes_videos: Server) -> None:
    connector = takes_videos.engine_client.input_processor.connector
    limits = connector._limits
    connector._limits = replace(limits, max_video_frames=3, max_video_bytes=10**6)
    try:
        error = error_of(takes_videos.chat(**user(video(as_url(write_video(23))))))
        assert "4 frames, at most 3" in error["message"]
        error = error_of(takes_videos.chat(**user(video(as_url(bytes(10**6 + 9))))))
        assert "at most 1000000" in error["message"]
    finally:
        connector._limits = limits


def test_placeholders_of_videos_in_a_text_are_text(takes_videos: Server) -> None:
    processor = takes_videos.engine_client.input_processor
    placeholder = processor.info.find_placeholder_str("video", 1) or ""
    response = takes_videos.chat(messages=[{"role": "user", "content": f"a {placeholder} b"}])
    if response.status_code == 200:
        assert not takes_videos.supervisor.engine.added[-1].mm_features
    else:
        assert "placeholders" in error_of(response)["message"]


def test_a_family_without_videos_says_so(server: Server) -> None:
    error = error_of(server.chat(**user(video(as_url(VIDEO)))))
    assert error["param"] == "messages[0].content[0].type"
    assert "takes no videos" in error["message"]
