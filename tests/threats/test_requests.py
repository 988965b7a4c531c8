"""Requests that are meant to break or to stall the server: refused early, alone, by name."""

import ast
import builtins
import socket
from pathlib import Path
from typing import Any

import pytest

from mmjax.server.flags import parse_flags
from tests.kit import BOS, EOS, IMAGE_END, IMAGE_SOFT, IMAGE_START, TURN_END, TURN_START
from tests.server.conftest import MakeServer, Server
from tests.server.test_app import image_message
from tests.server.test_bad_input import error_of

ROOT = Path(__file__).parents[2]
SPECIAL = [BOS, EOS, TURN_START, TURN_END, IMAGE_START, IMAGE_END, IMAGE_SOFT]


@pytest.mark.parametrize("token", SPECIAL)
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_CVE_2026_44222_special_tokens_in_texts_never_stand_for_images(
    server: Server, token: str, role: str
) -> None:
    other = {"role": "user", "content": "a"}
    half = len(token) // 2
    contents: list[Any] = [
        token,
        f"a {token} b",
        [{"type": "text", "text": token}],
    ]
    tokenizer: Any = server.engine_client.input_processor.tokenizer
    token_id = tokenizer.convert_tokens_to_ids(token)

    def count(**message: Any) -> int:
        response = server.chat(messages=[other, {"role": role, **message}, other])
        assert response.status_code == 200, response.text
        request = server.supervisor.engine.added[-1]
        assert not request.mm_features
        return list(request.prompt_token_ids).count(token_id)

    written_by_the_template = count(content="b")
    for content in contents:
        assert count(content=content) == written_by_the_template
    assert count(content="b", name=token) == written_by_the_template
    halves = [{"type": "text", "text": text} for text in (token[:half], token[half:])]
    error = error_of(server.chat(messages=[other, {"role": role, "content": halves}, other]))
    assert error["param"] == "messages[1].content"


def test_CVE_2026_44222_special_ids_in_a_prompt_fail_alone(server: Server) -> None:
    tokenizer: Any = server.engine_client.input_processor.tokenizer
    for token in SPECIAL:
        prompt = [tokenizer.convert_tokens_to_ids(token)] * 3
        status = server.http.post("/v1/completions", json={"prompt": prompt}).status_code
        assert status in (200, 400)
    assert server.chat().status_code == 200


def test_PYSEC_2026_2303_prompt_embeddings_have_no_field(server: Server) -> None:
    body = {"prompt": "a", "prompt_embeds": "AAAA"}
    assert error_of(server.http.post("/v1/completions", json=body))["param"] == "prompt_embeds"
    assert error_of(server.chat(prompt_embeds=["AAAA"]))["param"] == "prompt_embeds"


def test_CVE_2026_105758_media_io_kwargs_are_the_operators(make_server: MakeServer) -> None:
    closed = make_server()
    for kwargs in ({"video": {"fps": 1}}, {"image": {"image_mode": "RGBA"}}):
        assert error_of(closed.chat(media_io_kwargs=kwargs))["param"] == "media_io_kwargs"


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"video": {"fps": 10**9}}, ".video.fps"),
        ({"video": {"fps": float("1e308")}}, ".video.fps"),
        ({"video": {"num_frames": 10**9}}, ".video.num_frames"),
        ({"video": {"num_frames": 0}}, ".video.num_frames"),
        ({"video": {"num_frames": 2.5}}, ".video.num_frames"),
        ({"video": {"num_frames": True}}, ".video.num_frames"),
        ({"video": {"max_frames": 3}}, ".video.max_frames"),
        ({"video": {"video_backend": "opencv"}}, ".video.video_backend"),
        ({"image": {"image_mode": "RGBA"}}, ".image"),
        ({"video": 3}, ""),
    ],
    ids=str,
)
def test_CVE_2026_105758_trusted_ones_have_ceilings(
    make_server: MakeServer, kwargs: dict[str, Any], field: str
) -> None:
    server = make_server(trusts_mm_kwargs=True)
    error = error_of(server.chat(media_io_kwargs=kwargs))
    assert error["param"].startswith(f"media_io_kwargs{field}")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"code_revision": "evil"},
        {"trust_remote_code": True},
        {"revision": "evil"},
        {"images_kwargs": {"code_revision": "evil"}},
        {"image_processor_type": "evil"},
        {"auto_map": {"AutoProcessor": "evil--x"}},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_CVE_2026_114053_and_CVE_2026_27893_kwargs_load_no_code(
    make_server: MakeServer, kwargs: dict[str, Any]
) -> None:
    for trusts in (False, True):
        server = make_server(trusts_mm_kwargs=trusts)
        fields = {"messages": [image_message()], "mm_processor_kwargs": kwargs}
        assert error_of(server.chat(**fields))["param"].startswith("mm_processor_kwargs")


def test_CVE_2026_27893_code_of_checkpoints_is_never_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--trust-remote-code"])
    assert "--trust-remote-code" in capsys.readouterr().err
    for file in (ROOT / "mmjax").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), file
                assert node.value.value is False, file


def test_vllm_43117_processors_open_neither_files_nor_connections(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.chat(messages=[image_message(1)]).status_code == 200

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a processor reached out")

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        response = server.chat(messages=[image_message(2)])
    assert response.status_code == 200, response.text


def test_vllm_43117_no_processor_calls_a_loader() -> None:
    loaders = {("Image", "open"), ("requests", "get"), ("urllib", "request")}
    found = set()
    folders = ["models", "processing/items", "processing/image_processors", "processing/tensors"]
    for folder in folders:
        for file in (ROOT / "mmjax" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    pair = (node.value.id, node.attr)
                    found |= {(file.name, pair)} if pair in loaders else set()
    assert found == set()


@pytest.mark.parametrize("n", [65, 10**9, 2**63, -1])
def test_CVE_2026_34756_how_many_answers(server: Server, n: int) -> None:
    assert error_of(server.chat(n=n))["param"] == "n"
    body = {"prompt": ["a"] * 33, "n": 2}
    assert error_of(server.http.post("/v1/completions", json=body))["param"] == "n"
    assert server.supervisor.engine.added == []


def test_CVE_2026_73559_how_many_prompts(server: Server) -> None:
    for prompt in (["a"] * 65, [[1]] * 65):
        error = error_of(server.http.post("/v1/completions", json={"prompt": prompt}))
        assert error["param"].startswith("prompt")
    # So many are not even decoded.
    error = error_of(server.http.post("/v1/completions", json={"prompt": ["a"] * 100_000}))
    assert "send fewer of them" in error["message"]
    assert server.supervisor.engine.added == []


def test_CVE_2025_62426_and_CVE_2025_61620_templates_are_the_operators(server: Server) -> None:
    assert error_of(server.chat(chat_template="{{ 'a' * 10**9 }}"))["param"] == "chat_template"
    for kwargs in ({"tokenize": True}, {"chat_template": "x"}, {"messages": []}):
        error = error_of(server.chat(chat_template_kwargs=kwargs))
        assert (error["param"] or "").startswith("chat_template_kwargs")


def test_CVE_2026_114051_a_minimum_above_the_maximum(server: Server) -> None:
    assert error_of(server.chat(min_tokens=5, max_tokens=2))["param"] == "min_tokens"
    assert server.http.get("/health").status_code == 200
    assert server.chat().status_code == 200


def test_log_injection_by_a_request_id(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    for value in ("a\tb", "a" * 129, "é"):
        response = server.http.get("/v1/models", headers=[(b"x-request-id", value.encode())])
        assert response.headers["x-request-id"] != value
    with caplog.at_level("INFO"):
        server.http.get("/no%0d%0aINFO%20forged")
    assert "\nINFO forged" not in caplog.text
    assert "\r" not in caplog.text
