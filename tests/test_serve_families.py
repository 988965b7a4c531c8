"""Every family answers over HTTP, in two processes, as `mmjax.LLM` does in one.

A start takes most of the time: a family of clips runs by default (`test_serve.py` asks one of
pictures), the others in the slow run.
"""

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from mmjax import LLM, SamplingParams
from tests.families import ALL_FAMILIES, CLIP_FAMILIES
from tests.families.default_run import mark
from tests.families.family import Family
from tests.families.qwen2_5_omni import QWEN2_5_OMNI
from tests.kit import draw
from tests.models.test_clip_laws import audio_part, draw_clip
from tests.processing.test_audio_file import write_heard_video
from tests.test_serve import Served, message_about

WITHOUT_CHATS = {"whisper"}
"""Served by a route of its own: `tests/server/test_transcripts.py`."""
MAX_TOKENS = 8


SETTLED = {"lfm3_vl", "ovis2", "qwen3_5"}
"""Whose tiny weights answer both alike; `tests/models/test_hf_answers.py` has its pictures."""


def make_conversations(family: Family) -> list[list[Any]]:
    """Return one with an image in its first turn, and one with an image in a later turn.

    Where a prompt holds several images, the later turn is about a second one.
    """
    question = family.question
    text = [{"role": "user", "content": question}]
    answer = {"role": "assistant", "content": "red"}
    early, late = (make_message(family, seed) for seed in range(2))
    before = text if family.max_images == 1 else [early]
    return [[early, answer, *text], [*before, answer, late]]


def make_message(family: Family, seed: int) -> Any:
    """Return a question about a picture, or about a clip where the model only hears."""
    if family.name not in CLIP_FAMILIES:
        return message_about(draw(40 + 30 * seed, 50, seed), family.question)
    text = {"type": "text", "text": family.question}
    return {"role": "user", "content": [audio_part(draw_clip(seed)), text]}


def ask(address: str, messages: Sequence[Any]) -> str:
    """Return a streamed answer's text, after finding it equal to the one that is sent whole."""
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        create: Any = partial(
            client.chat.completions.create,
            model="tiny",
            messages=list(messages),
            temperature=0,
            max_tokens=MAX_TOKENS,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )
        whole = create()
        chunks = list(create(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == MAX_TOKENS
    details = whole.usage.prompt_tokens_details.to_dict()
    assert details["image_tokens"] + details["audio_tokens"] > 0
    return text


@pytest.fixture
def served(family: Family, tmp_path: Path) -> Iterator[Any]:
    """The directory, and the address of its server."""
    path = family.write(tmp_path)
    flags = [
        word
        for key, value in family.llm_settings.items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    flags += ["--served-model-name", "tiny", "--precompile", "none", "--trust-request-mm-kwargs"]
    server = Served(str(path), *flags)
    try:
        found = server.wait_for(r"mmjax serving tiny at (http://127\.0\.0\.1:\d+)\n")
        assert "started the engine process" in server.output
        yield path, f"{found.group(1)}/v1"
    finally:
        server.end()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=name, marks=mark("HTTP", name))
        for name, family in ALL_FAMILIES.items()
        if name not in WITHOUT_CHATS
    ],
)
def test_a_family_answers_over_http(family: Family, served: Any):
    path, address = served
    conversations = make_conversations(family)
    with ThreadPoolExecutor(len(conversations)) as pool:
        answers = list(pool.map(partial(ask, address), conversations))
    assert [ask(address, conversation) for conversation in conversations] == answers
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, skip_special_tokens=False
    )
    with LLM(path, use_tqdm_on_load=False, **family.llm_settings) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    assert answers == [output.outputs[0].text for output in outputs]
    assert answers[0] != answers[1] or family.name in SETTLED, "the image's place changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("family", [QWEN2_5_OMNI], ids=["qwen2_5_omni"])
def test_a_video_is_heard_over_http(family: Family, served: Any):
    """By the request's own `mm_processor_kwargs`: the server's default is to see it alone."""
    path, address = served
    url = f"data:video/mp4;base64,{base64.b64encode(write_heard_video()).decode()}"
    video = {"type": "video_url", "video_url": {"url": url}}
    messages: Any = [{"role": "user", "content": [video, {"type": "text", "text": "what is it"}]}]
    fields: dict[str, Any] = {"media_io_kwargs": {"video": {"num_frames": 4}}}
    heard = {**fields, "mm_processor_kwargs": {"use_audio_in_video": True}}
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        create: Any = partial(
            client.chat.completions.create, model="tiny", messages=messages, temperature=0
        )
        options = {"ignore_eos": True, "skip_special_tokens": False}
        answers = [
            create(max_tokens=MAX_TOKENS, extra_body={**options, **one}) for one in (fields, heard)
        ]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, **options)
    settings = {**family.llm_settings, "mm_processor_kwargs": heard["mm_processor_kwargs"]}
    with LLM(path, use_tqdm_on_load=False, **settings) as llm:
        (expected,) = llm.chat(messages, params, use_tqdm=False, **fields)
    silent, whole = answers
    assert whole.choices[0].message.content == expected.outputs[0].text
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.prompt_tokens > silent.usage.prompt_tokens
    assert whole.choices[0].message.content != silent.choices[0].message.content
