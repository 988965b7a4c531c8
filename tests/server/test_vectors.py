"""Routes of vectors at a server of text: each says what to start it with. And empty prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
        ("/score", {"text_1": "a", "documents": "b"}, "give one pair"),
        ("/score", {"text_1": "a", "text_2": "b", "data_1": "c"}, "give one pair"),
    ],
)
def test_a_wrong_field_is_named(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert param in response.text


LONG = "red " * 400
CHAT = [{"role": "user", "content": "a red circle"}]
BEGUN = [*CHAT, {"role": "assistant", "content": "a blue"}]


@pytest.fixture(scope="module")
def of_vectors(tiny_gemma3: Path) -> Iterator[Server]:
    """A server of vectors, each of which is its prompt's token ids."""
    config = load_model_config(str(tiny_gemma3), max_model_len=256, runner="pooling")
    processor = InputProcessor(config)
    with servers(processor, processor) as make:
        yield make(trust_request_chat_template=True)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "<bos><start_of_turn>user\na red circle<end_of_turn>\n"),
        (
            {"add_generation_prompt": True},
            "<bos><start_of_turn>user\na red circle<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            {"messages": BEGUN, "continue_final_message": True},
            "<bos><start_of_turn>user\na red circle<end_of_turn>\n<start_of_turn>model\na blue",
        ),
        ({"chat_template": "{{ messages[0].content }} now"}, "a red circle now"),
        (
            {"chat_template": "{{ messages[0].content }}", "add_special_tokens": True},
            "<bos>a red circle",
        ),
    ],
)
def test_messages_have_the_fields_of_vllms_clients(
    of_vectors: Server, path: str, fields: dict[str, Any], text: str
) -> None:
    """No answer is begun unless it is asked for: a vector is of the prompt's last token."""
    response = of_vectors.http.post(path, json={"messages": CHAT, **fields})
    assert response.status_code == 200, response.text
    (one,) = response.json()["data"]
    tokenizer = of_vectors.engine_client.input_processor.tokenizer
    vector = one.get("embedding", one.get("data"))
    assert vector == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("given", [[[]], [[5, 6], []]])
def test_an_empty_list_of_token_ids_is_refused(of_vectors: Server, given: Any) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        response = of_vectors.http.post(path, json={"input": given})
        assert response.status_code == 400, response.text
        assert "empty" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": LONG}, "input"),
        ({"input": ["red", LONG]}, "input[1]"),
        ({"messages": [{**CHAT[0], "content": LONG}]}, "messages"),
    ],
)
def test_a_prompt_that_is_too_long_is_named_by_its_field(
    of_vectors: Server, body: dict[str, Any], param: str
) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        response = of_vectors.http.post(path, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


def test_a_text_may_have_no_special_tokens(of_vectors: Server) -> None:
    for fields, is_begun in (({}, True), ({"add_special_tokens": False}, False)):
        response = of_vectors.http.post("/v1/embeddings", json={"input": "a circle", **fields})
        (one,) = response.json()["data"]
        bos = of_vectors.engine_client.input_processor.tokenizer.bos_token_id
        assert (one["embedding"][0] == bos) is is_begun


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
        {"input": "a", "add_generation_prompt": True},
    ],
)
def test_fields_of_messages_are_checked(of_vectors: Server, fields: dict[str, Any]) -> None:
    response = of_vectors.http.post("/v1/embeddings", json=fields)
    assert response.status_code == 400
    assert "add_generation_prompt" in response.text


@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_scores_are_asked_for_by_any_of_vllms_names(
    of_vectors: Server, names: tuple[str, str]
) -> None:
    first, second = names
    texts = ["a circle", "a red"]
    body = {first: texts[0], second: texts, "encoding_format": "float", "use_activation": False}
    response = of_vectors.http.post("/score", json=body)
    assert response.status_code == 200, response.text
    tokenizer = of_vectors.engine_client.input_processor.tokenizer
    asked: Any = of_vectors.supervisor.engine.added[-1].sampling_params.pooling
    assert asked.use_activation, "scores are cosines"
    query, other = (np.array(tokenizer.encode(one)) for one in texts)
    expected = [float(query @ query), float(query @ other)]
    assert [one["score"] for one in response.json()["data"]] == expected


BROKEN = {"content": [{"type": "image_url", "image_url": {"url": "ftp://x"}}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": LONG, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", LONG]}, "documents[1]"),
        (
            "/rerank",
            {"query": "a", "documents": ["a", BROKEN]},
            "documents[1].content[0].image_url.url",
        ),
        ("/score", {"text_1": "a", "text_2": LONG}, "text_2"),
        ("/score", {"queries": ["a", LONG], "items": ["a", "b"]}, "queries[1]"),
        ("/score", {"data_1": ["a", "b"], "data_2": ["a", "b", "c"]}, "data_1"),
    ],
)
def test_what_is_refused_is_named(
    of_vectors: Server, path: str, body: dict[str, Any], param: str
) -> None:
    response = of_vectors.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_under_each_path_of_vllms(of_vectors: Server, path: str) -> None:
    body = {"query": "a circle", "documents": ["a circle"]}
    response = of_vectors.http.post(path, json=body)
    assert response.status_code == 200, response.text
    (one,) = response.json()["results"]
    assert one["document"] == {"text": "a circle"}
