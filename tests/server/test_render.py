"""`/v1/chat/completions/render`: what processing makes of a conversation, and nothing else."""

from typing import Any

from tests.kit import IMAGE_SOFT
from tests.server.conftest import MakeServer, Server
from tests.server.test_app import data_url, image_message
from tests.server.test_bad_input import error_of

PATH = "/v1/chat/completions/render"


def render(server: Server, **fields: Any) -> Any:
    body = {"messages": [image_message()], **fields}
    return server.http.post(PATH, json=body)


def test_a_picture_is_shown_with_all_that_it_became(server: Server) -> None:
    answer = render(server).json()
    assert answer["object"] == "chat.completion.render"
    assert answer["model"] == "tiny"
    assert "What color?" in answer["prompt"]
    assert len(answer["tokens"]) == len(answer["prompt_token_ids"])
    (item,) = answer["items"]
    places = range(item["offset"], item["offset"] + item["length"])
    embedded = [place for place, is_embed in zip(places, item["is_embed"], strict=True) if is_embed]
    soft = [place for place, token in enumerate(answer["tokens"]) if token == IMAGE_SOFT]
    assert embedded == soft
    assert item["num_embeds"] == len(soft) == 4
    assert item["cache"] == "miss"
    assert item["tensors"]["pixel_values"]["shapes"] == [[1, 3, 56, 56]]
    assert item["identifier"] == item["mm_hash"]


def test_it_equals_what_a_request_gets_and_tells_of_the_cache(make_server: MakeServer) -> None:
    server = make_server()
    before = render(server).json()
    assert render(server).json()["items"][0]["cache"] == "miss"  # rendering caches nothing
    chat = server.chat(messages=[image_message()], return_token_ids=True).json()
    assert chat["prompt_token_ids"] == before["prompt_token_ids"]
    after = render(server).json()
    assert after["items"][0].pop("cache") == "hit"
    assert before["items"][0].pop("cache") == "miss"
    assert after == before  # tensors too, though P1 alone holds them


def test_text_alone(server: Server) -> None:
    answer = render(server, messages=[{"role": "user", "content": "hello"}]).json()
    assert answer["items"] == []


def test_what_a_request_may_not_have_is_refused_here_too(server: Server) -> None:
    response = render(server, model="gpt")
    assert response.status_code == 404
    response = render(server, messages=[])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    bad = image_message()
    bad["content"][0]["image_url"]["url"] = data_url()[:80]
    assert render(server, messages=[bad]).status_code == 422
    response = render(server, mm_processor_kwargs={"do_pan_and_scan": True})
    assert response.json()["error"]["param"] == "mm_processor_kwargs"


def test_a_prompt_that_no_request_could_have_is_not_rendered(server: Server) -> None:
    long = [{"role": "user", "content": "a red circle " * 300}]
    answers = [server.chat(messages=long), render(server, messages=long)]
    errors = [error_of(answer) for answer in answers]
    assert errors[0] == errors[1]
    assert "256" in errors[0]["message"]


def test_no_client_learns_what_another_has_sent(make_server: MakeServer) -> None:
    server = make_server(api_keys=("alices", "bobs"))

    def post(path: str, key: str) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return server.http.post(path, json={"messages": [image_message()]}, headers=headers)

    before = post(PATH, "bobs").json()
    assert post("/v1/chat/completions", "alices").status_code == 200
    assert post(PATH, "bobs").json() == before
    assert before["items"][0]["cache"] == "hidden"
