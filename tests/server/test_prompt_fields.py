"""Fields about the prompt: its log-probabilities before the answer's, its end alone, its ids."""

from typing import Any

import pytest
from tokenizers import decoders

from mmjax.frontend.prompt.input_processor import InputProcessor
from tests.server.conftest import MakeServer, Server, events_of, servers
from tests.server.test_app import image_message
from tests.server.test_bad_input import error_of

PROMPT = "a red circle"


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 2, **fields}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return events_of(response)


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the choices of a stream, each with its pieces put together."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (one for chunk in chunks for one in chunk["choices"]):
        whole = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
        whole["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"].setdefault(name, []).extend(values)
    return found


def test_the_best_n_of_n_are_all(server: Server) -> None:
    answer = complete(server, n=2, best_of=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("red " * 5000, "prompt"), ([PROMPT, "red " * 5000], "prompt[1]")],
    ids=["one", "several"],
)
def test_a_prompt_that_is_too_long_is_named(server: Server, prompt: Any, param: str) -> None:
    response = server.http.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("n", [1, 3])
def test_echo_with_logprobs_has_those_of_the_prompt_first(server: Server, n: int) -> None:
    tokenizer: Any = server.engine_client.input_processor.tokenizer
    prompt_ids = tokenizer.encode(PROMPT)
    fields = {"echo": True, "logprobs": 1, "n": n}
    answer = complete(server, **fields)
    plain = complete(server, logprobs=1, n=n)
    for choice, without in zip(answer["choices"], plain["choices"], strict=True):
        shown = choice["logprobs"]
        assert choice["text"] == PROMPT + without["text"]
        assert len(set(map(len, shown.values()))) == 1
        count = len(prompt_ids)
        assert shown["tokens"][:count] == [tokenizer.decode([one]) for one in prompt_ids]
        assert shown["tokens"][count:] == without["logprobs"]["tokens"]
        assert shown["token_logprobs"][0] is None
        assert shown["top_logprobs"][0] is None
        assert shown["token_logprobs"][1:count] == [-1.0] * (count - 1)
        assert shown["top_logprobs"][1] == {shown["tokens"][1]: -1.0}
        assert shown["text_offset"] == sorted(shown["text_offset"])
        assert shown["text_offset"][:2] == [0, 0], "BOS is in no text"
        assert "prompt_logprobs" not in choice
    body = {"prompt": PROMPT, "max_tokens": 2, **fields}
    streamed = joined(stream(server, "/v1/completions", body))
    assert streamed == {
        choice["index"]: {"text": choice["text"], "logprobs": choice["logprobs"]}
        for choice in answer["choices"]
    }


def test_echo_alone_with_logprobs_generates_nothing(server: Server) -> None:
    answer = complete(server, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT
    num_prompt_tokens = answer["usage"]["prompt_tokens"]
    assert len(choice["logprobs"]["tokens"]) == num_prompt_tokens
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_of_two_prompts_has_the_logprobs_of_each(server: Server) -> None:
    answer = complete(server, prompt=["a", "a red"], echo=True, logprobs=1, prompt_logprobs=1)
    first, second = (len(choice["logprobs"]["tokens"]) for choice in answer["choices"])
    assert second > first
    assert all(choice["prompt_logprobs"] for choice in answer["choices"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_of_a_prompt_its_last_tokens_are_kept(server: Server, path: str) -> None:
    text = {"prompt": PROMPT * 9}
    body: dict[str, Any] = (
        text
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": PROMPT * 9}]}
    )
    whole = server.http.post(path, json=body).json()
    ids = list(server.supervisor.engine.added[-1].prompt_token_ids)
    assert whole["usage"]["prompt_tokens"] == len(ids) > 20
    for most in (1, 5, len(ids), 10**6):
        response = server.http.post(path, json={**body, "truncate_prompt_tokens": most})
        assert response.status_code == 200, response.text
        assert list(server.supervisor.engine.added[-1].prompt_token_ids) == ids[-most:]
        assert response.json()["usage"]["prompt_tokens"] == min(most, len(ids))


def test_what_is_too_long_is_cut_to_what_fits(server: Server) -> None:
    body = {"prompt": "red " * 2000, "max_tokens": 1}
    assert error_of(server.http.post("/v1/completions", json=body))["param"] == "prompt"
    body["truncate_prompt_tokens"] = -1
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == 255


def test_a_prompt_with_pictures_is_not_cut(server: Server) -> None:
    error = error_of(server.chat(messages=[image_message()], truncate_prompt_tokens=5))
    assert error["param"] == "truncate_prompt_tokens"


def test_token_ids_of_prompts_and_answers(server: Server) -> None:
    answer = complete(server, prompt=["a", PROMPT], return_token_ids=True)
    sent = [list(one.prompt_token_ids) for one in server.supervisor.engine.added]
    told = [choice["prompt_token_ids"] for choice in answer["choices"]]
    # They are prepared side by side.
    assert sorted(told) == sorted(sent)
    assert len(told[0]) < len(told[1])
    assert all(len(choice["token_ids"]) == 2 for choice in answer["choices"])
    assert "prompt_token_ids" not in complete(server)["choices"][0]
    body = {"prompt": PROMPT, "max_tokens": 2, "return_token_ids": True}
    chunks = stream(server, "/v1/completions", body)
    with_ids = [chunk for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]]
    assert with_ids == chunks[:1]
    assert with_ids[0]["choices"][0]["prompt_token_ids"] == told[1]
    chat = {"messages": [{"role": "user", "content": "a"}], "return_token_ids": True}
    chunks = stream(server, "/v1/chat/completions", chat)
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
        list(server.supervisor.engine.added[-1].prompt_token_ids)
    ]


def test_the_role_of_answers_is_the_operators(make_server: MakeServer) -> None:
    server = make_server(response_role="model")
    assert server.chat().json()["choices"][0]["message"]["role"] == "model"
    body = {"messages": [{"role": "user", "content": "a"}]}
    chunks = stream(server, "/v1/chat/completions", body)
    assert chunks[0]["choices"][0]["delta"]["role"] == "model"
    going_on = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    answer = server.http.post("/v1/chat/completions", json=going_on).json()
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("is_new", [False, True])
def test_an_answer_that_a_message_goes_on_with_keeps_the_space_before_it(
    server_input_processor: InputProcessor, is_new: bool
) -> None:
    """Which decoders of SentencePiece drop at a text's beginning."""
    processor = InputProcessor(server_input_processor.model_config)
    tokenizer = processor.tokenizer.backend_tokenizer
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Strip(" ", 1, 0)])
    with servers(processor, processor) as make:
        server = make()
        server.will_say(" red")
        body: Any = {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "is"}],
            "continue_final_message": not is_new,
            "add_generation_prompt": is_new,
        }
        expected = "red" if is_new else " red"
        answer = server.http.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == expected
        if not is_new:
            message = {"messages": body["messages"], "max_tokens": 9}
            answer = server.http.post("/v1/messages", json=message).json()
            assert answer["content"][0]["text"] == expected
