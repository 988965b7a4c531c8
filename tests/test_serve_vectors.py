"""Vectors and scores over HTTP, in two processes, are those of `mmjax.LLM` in one."""

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from openai import OpenAI

from mmjax import LLM
from tests.families.directories import made_once
from tests.families.retrieval import COLQWEN2
from tests.kit import draw
from tests.test_serve import Served, message_about

FLAGS = ("--max-num-seqs", "4", "--max-model-len", "256", "--precompile", "none")
TEXTS = ["which color is the circle", "two cats"]
PICTURE = draw(90, 70, 0)
PART = message_about(PICTURE, "")["content"][0]
MESSAGES = [{"role": "user", "content": [PART]}]


@contextmanager
def serving(path: Path, *flags: str) -> Iterator[httpx2.Client]:
    server = Served(str(path), *FLAGS, *flags, "--served-model-name", "tiny")
    try:
        found = server.wait_for(r"mmjax serving tiny at (http://127\.0\.0\.1:\d+)\n")
        with httpx2.Client(base_url=found.group(1), timeout=300) as client:
            yield client
    finally:
        server.end()


def post(client: httpx2.Client, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json={"model": "tiny", **body})
    assert response.status_code == status, response.text
    return response.json()


def open_llm(path: Path, **settings: Any) -> LLM:
    return LLM(path, max_num_seqs=4, max_model_len=256, use_tqdm_on_load=False, **settings)


def test_a_vector_for_each_token() -> None:
    path = made_once(COLQWEN2.write)()
    with open_llm(path) as llm:
        picture: Any = {"prompt": "", "multi_modal_data": {"image": PICTURE}}
        outputs = llm.encode([*TEXTS, picture], use_tqdm=False)
        scores = [
            one.outputs.score for one in llm.score(TEXTS[0], [TEXTS[1], picture], use_tqdm=False)
        ]
    expected = [output.outputs.data for output in outputs]
    with serving(path) as client:
        found = post(client, "/pooling", input=TEXTS)
        for one, vectors in zip(found["data"], expected, strict=False):
            np.testing.assert_array_equal(np.float32(one["data"]), vectors)
        assert found["usage"]["prompt_tokens"] == sum(map(len, expected[:2]))
        (shown,) = post(client, "/pooling", messages=MESSAGES, encoding_format="base64")["data"]
        flat = np.frombuffer(base64.b64decode(shown["data"]), "<f4")
        np.testing.assert_array_equal(flat.reshape(shown["shape"]), expected[2])
        given = {"query": TEXTS[0], "documents": [TEXTS[1], {"content": [PART]}]}
        ranked = post(client, "/rerank", **given)["results"]
        assert {one["index"]: one["relevance_score"] for one in ranked} == dict(enumerate(scores))
        assert ranked[0]["relevance_score"] == max(scores)
        (best,) = post(client, "/v1/rerank", **given, top_n=1, return_documents=False)["results"]
        assert best == {name: ranked[0][name] for name in ("index", "relevance_score")}
        scored = post(client, "/score", text_1=TEXTS[0], text_2=given["documents"])["data"]
        assert [one["score"] for one in scored] == scores
        for path_, body, reason in (
            ("/v1/embeddings", {"input": TEXTS}, "none for a whole prompt"),
            ("/v1/chat/completions", {"messages": MESSAGES}, "generates no text"),
            ("/v1/completions", {"prompt": "a"}, "generates no text"),
            ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "give one, or as many"),
        ):
            assert reason in post(client, path_, 400, **body)["error"]["message"]


def run_batch(client: OpenAI, path: Any, *bodies: dict[str, Any]) -> list[Any]:
    """Return the bodies of a batch's answers."""
    lines = [
        {"custom_id": str(number), "url": path, "body": body} for number, body in enumerate(bodies)
    ]
    data = b"\n".join(map(msgspec.json.encode, lines))
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None, batch
    results = map(msgspec.json.decode, client.files.content(batch.output_file_id).text.splitlines())
    by_id = {one["custom_id"]: one["response"]["body"] for one in results}
    return [by_id[line["custom_id"]] for line in lines]


def test_a_vector_for_each_prompt(tiny_gemma3: Path, tmp_path: Path) -> None:
    with open_llm(tiny_gemma3, runner="pooling") as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    expected = [output.outputs.embedding for output in outputs]
    flags = ["--runner", "pooling", "--api-key", "secret", "--max-num-queued-reqs", "12"]
    flags += ["--batch-dir", str(tmp_path)]
    with serving(tiny_gemma3, *flags) as client:
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        address = f"{client.base_url}/v1"
        with OpenAI(base_url=address, api_key="secret", max_retries=0) as official:
            # By default it asks for base64.
            found = official.embeddings.create(model="tiny", input=TEXTS)
            # As the texts of an index are sent: more than the server holds at once.
            many = official.embeddings.create(model="tiny", input=TEXTS * 40)
            bodies: list[dict[str, Any]] = [{"input": TEXTS}, {"input": TEXTS[1]}]
            lines = run_batch(official, "/v1/embeddings", *bodies)
            (ranked,) = run_batch(official, "/v1/rerank", {"query": "a", "documents": TEXTS})
        assert [one["embedding"] for one in lines[0]["data"]] == expected
        assert len(lines[1]["data"]) == 1
        assert sorted(one["index"] for one in ranked["results"]) == [0, 1]
        assert [one.embedding for one in found.data] == expected
        assert [one.embedding for one in many.data] == expected * 40
        assert [one.index for one in many.data] == list(range(80))
        ids = outputs[1].prompt_token_ids
        assert found.usage.prompt_tokens == len(outputs[0].prompt_token_ids) + len(ids)
        whole = post(client, "/v1/embeddings", input=[ids])
        assert whole["data"][0]["embedding"] == expected[1]
        assert len(post(client, "/v1/embeddings", messages=MESSAGES)["data"]) == 1
        (tokens,) = post(client, "/pooling", input=TEXTS[1], task="token_embed")["data"]
        assert tokens["shape"] == [len(ids), len(expected[1])]
        assert tokens["data"][-1] == pytest.approx(expected[1], abs=1e-6)
        for body, reason in (
            ({"input": "a", "dimensions": 8}, "was not trained to have its vectors cut"),
            ({"input": []}, "is empty"),
            ({"input": ["a"] * 2049}, "at most 2048"),
            ({}, "give one, and not both"),
            ({"input": "a", "messages": MESSAGES}, "give one, and not both"),
            ({"input": "a " * 300}, "max_model_len"),
        ):
            assert reason in post(client, "/v1/embeddings", 400, **body)["error"]["message"]
        assert post(client, "/v1/embeddings", 404, input="a", model="other")
