"""Routes of vectors at a server of text: each says what to start it with. And empty prompts."""

from pathlib import Path
from typing import Any

import pytest

from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from tests.server.conftest import Server, servers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": ["a", "b"]}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
    ],
)
def test_they_are_refused(server: Server, path: str, body: dict[str, Any]) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert "--runner pooling" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "task": "embed"}, "task"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "image"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/score", {"text_1": "a"}, "text_2"),
    ],
)
def test_a_wrong_field_is_named(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert param in response.text


@pytest.mark.parametrize("given", [[[]], [[5, 6], []]])
def test_an_empty_list_of_token_ids_is_refused(tiny_gemma3: Path, given: Any) -> None:
    config = load_model_config(str(tiny_gemma3), max_model_len=256, runner="pooling")
    processor = InputProcessor(config)
    with servers(processor, processor) as make:
        http = make().http
        for path in ("/v1/embeddings", "/pooling"):
            response = http.post(path, json={"input": given})
            assert response.status_code == 400, response.text
            assert "empty" in response.json()["error"]["message"]
