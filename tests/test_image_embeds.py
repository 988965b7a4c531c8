"""Pre-computed image embeddings through `LLM`: in every form, the picture's own answer."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save

from mmjax import LLM, SamplingParams
from mmjax.errors import RequestError
from tests.kit import IMAGE_START, draw

SIZES = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=5)
PROMPT = f"{IMAGE_START} What color is the circle?"
WIDTH, ROWS = 32, 4


def open_llm(model: Path, **settings: Any) -> LLM:
    settings = {"enable_mm_embeds": True, **SIZES, **settings}
    return LLM(str(model), use_tqdm_on_load=False, **settings)


@pytest.fixture(scope="module")
def llm(tiny_gemma3: Path) -> Iterator[LLM]:
    with open_llm(tiny_gemma3) as made:
        yield made


def report(outputs: list[Any]) -> list[Any]:
    """Return tokens and log-probabilities, bit for bit."""
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


def generate(llm: LLM, image: Any, prompt: str = PROMPT) -> list[Any]:
    data = {"prompt": prompt, "multi_modal_data": {"image": image}}
    return report(llm.generate(data, GREEDY, use_tqdm=False))


def encode(llm: LLM, picture: Any) -> np.ndarray:
    """Return the rows that the model's tower gives for a picture."""
    (rows,) = llm.embed_multimodal({"prompt": PROMPT, "multi_modal_data": {"image": picture}})
    return rows


FORMS: dict[str, Any] = {
    "jax, 3-D": lambda rows: jnp.asarray(rows)[None],
    "torch, 3-D": lambda rows: torch.from_numpy(rows.copy())[None],
    "list of jax": lambda rows: [jnp.asarray(rows)],
    "dict of numpy, 2-D": lambda rows: {"image_embeds": rows},
    "dict of numpy, 3-D": lambda rows: {"image_embeds": rows[None]},
    "dict of a list": lambda rows: {"image_embeds": [rows]},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_pictures_own_answer(llm: LLM, form: str):
    for seed in range(3):
        picture = draw(40, 30, seed)
        assert generate(llm, FORMS[form](encode(llm, picture))) == generate(llm, picture)
    assert llm.engine.compilations == 0


def test_several_of_them_among_pictures_of_other_requests(llm: LLM):
    pictures = [draw(40, 30, seed) for seed in range(3)]
    rows = [encode(llm, picture) for picture in pictures]
    prompt = f"{IMAGE_START} or {IMAGE_START} and {IMAGE_START}?"
    prompts: list[Any] = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 1, 0)):
        for images in ([pictures[n] for n in order], {"image_embeds": [rows[n] for n in order]}):
            prompts.append({"prompt": prompt, "multi_modal_data": {"image": images}})
    answers = report(llm.generate(prompts, GREEDY, use_tqdm=False))
    assert answers[::2] == answers[1::2]
    assert len({str(answer) for answer in answers}) == 3
    ids = [item.token_ids for item in llm.generate(prompts, GREEDY, use_tqdm=False)[0].outputs]
    assert ids == [answers[0][0]]


def test_they_are_cached_by_their_content(llm: LLM):
    rows = encode(llm, draw(40, 30, 5))
    data: Any = {"prompt": PROMPT, "multi_modal_data": {"image": {"image_embeds": rows}}}
    assert llm.explain(data).items[0].cache == "miss"
    first = generate(llm, {"image_embeds": rows})
    assert llm.explain(data).items[0].cache == "hit"
    assert generate(llm, {"image_embeds": rows}) == first
    rows = rows.copy()
    rows[0, 0] += 1
    assert generate(llm, {"image_embeds": rows}) != first


def test_an_id_stands_for_them(llm: LLM):
    rows = encode(llm, draw(40, 30, 6))
    first = generate(llm, {"image_embeds": rows})
    for images in ({"image_embeds": rows}, {"image_embeds": [None]}, None):
        data: Any = {
            "prompt": PROMPT,
            "multi_modal_data": {"image": images},
            "multi_modal_uuids": {"image": ["six"]},
        }
        assert report(llm.generate(data, GREEDY, use_tqdm=False)) == first


def conversation(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What color?"}]}]


def base64_of(**tensors: np.ndarray) -> str:
    return base64.b64encode(save(tensors)).decode()


def chat(llm: LLM, *parts: dict[str, Any]) -> list[Any]:
    return report(llm.chat(conversation(*parts), GREEDY, use_tqdm=False))


def test_parts_of_a_conversation(llm: LLM):
    picture = draw(40, 30, 2)
    rows = encode(llm, picture)
    expected = chat(llm, {"type": "image_pil", "image_pil": picture})
    for value in (rows, rows[None], jnp.asarray(rows), base64_of(rows=rows)):
        assert chat(llm, {"type": "image_embeds", "image_embeds": value}) == expected
    with pytest.raises(RequestError, match="images or `image_embeds`, and not both"):
        chat(
            llm,
            {"type": "image_pil", "image_pil": picture},
            {"type": "image_embeds", "image_embeds": rows},
        )


def test_what_explain_shows(llm: LLM):
    rows = encode(llm, draw(40, 30, 2))
    part = {"type": "image_embeds", "image_embeds": rows}
    shown = llm.explain(conversation(part))
    picture = llm.explain(conversation({"type": "image_pil", "image_pil": draw(40, 30, 2)}))
    assert shown.prompt_token_ids == picture.prompt_token_ids
    (item,) = shown.items
    assert (item.num_embeds, item.offset) == (ROWS, picture.items[0].offset)
    assert item.tensors is None or item.tensors.keys() == {"image_embeds"}


def test_16_bits_a_value_are_taken(llm: LLM):
    rows = encode(llm, draw(40, 30, 2))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        rounded = rows.astype(dtype)
        expected = generate(llm, {"image_embeds": rounded.astype(np.float32)})
        assert generate(llm, {"image_embeds": rounded}) == expected


def test_crops_of_pan_and_scan(tiny_gemma3: Path):
    kwargs = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 16,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    with open_llm(tiny_gemma3, mm_processor_kwargs=kwargs) as llm:
        for size, num_rows in (((30, 30), ROWS), ((90, 30), 4 * ROWS)):
            picture = draw(*size)
            rows = encode(llm, picture)
            assert len(rows) == num_rows
            assert generate(llm, {"image_embeds": rows}) == generate(llm, picture)
        with pytest.raises(RequestError, match=r"have 20 rows; an image has 4, .* 16 at most"):
            generate(llm, {"image_embeds": np.zeros((20, WIDTH), np.float32)})
        assert llm.engine.compilations == 0


def test_no_tower_is_needed(llm: LLM, tiny_gemma3: Path):
    pictures = [draw(40, 30, seed) for seed in range(2)]
    rows = [encode(llm, picture) for picture in pictures]
    with open_llm(tiny_gemma3, limit_mm_per_prompt={"image": 0}) as bare:
        for picture, one in zip(pictures, rows, strict=True):
            assert generate(bare, {"image_embeds": one}) == generate(llm, picture)
            part = {"type": "image_embeds", "image_embeds": one}
            expected = chat(llm, {"type": "image_pil", "image_pil": picture})
            assert chat(bare, part) == expected
        with pytest.raises(RequestError, match=r"At most 0 image"):
            generate(bare, pictures[0])
        with_tower, without = (one.engine._runner.buckets for one in (llm, bare))
        assert without.num_programs < with_tower.num_programs
        assert bare.engine.compilations == 0


# ---- refusals ------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ({"image_embeds": zeros(3, WIDTH)}, r"have 3 rows; an image has 4: give"),
        ({"image_embeds": zeros(8, WIDTH)}, r"have 8 rows; an image has 4: give"),
        ({"image_embeds": zeros(0, WIDTH)}, r"have 0 rows"),
        ({"image_embeds": zeros(ROWS, 31)}, r"got 31, the model has 32"),
        ({"image_embeds": zeros(ROWS)}, r"must be 2D .* 3D"),
        ({"image_embeds": zeros(ROWS, WIDTH, dtype=np.int32)}, "dtype is int32"),
        ({"image_embeds": np.full((ROWS, WIDTH), np.inf)}, "NaN or infinite"),
        ({"image_embeds": "abc"}, "`image_embeds` has the type `str`"),
        ({"image_embeds": None}, "`image_embeds` has the type `NoneType`"),
        ({"image_embeds": [[1.0]]}, "have `list` at index 0"),
        ({}, r"has the keys \[\]; it must have `image_embeds` alone"),
        ({"image_embeds": zeros(ROWS, WIDTH), "more": 1}, "`image_embeds` alone"),
    ],
)
def test_what_is_wrong_is_named(llm: LLM, image: Any, words: str):
    with pytest.raises(RequestError, match=words) as caught:
        generate(llm, image)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("multi_modal_data")


def test_the_operator_must_take_them(tiny_gemma3: Path):
    with open_llm(tiny_gemma3, enable_mm_embeds=False) as off:
        for image in ({"image_embeds": zeros(ROWS, WIDTH)}, jnp.zeros((1, ROWS, WIDTH))):
            with pytest.raises(RequestError, match="--enable-mm-embeds"):
                generate(off, image)
        with pytest.raises(RequestError, match="--enable-mm-embeds"):
            chat(off, {"type": "image_embeds", "image_embeds": zeros(ROWS, WIDTH)})


def test_embeddings_are_of_each_item_in_order_also_of_a_conversation(llm: LLM):
    pictures = [draw(40, 30, seed) for seed in range(3)]
    alone = [encode(llm, picture) for picture in pictures]
    assert all(rows.shape == (ROWS, WIDTH) and rows.dtype == np.float32 for rows in alone)
    assert len({rows.tobytes() for rows in alone}) == len(pictures)
    parts = [{"type": "image_pil", "image_pil": picture} for picture in reversed(pictures)]
    text = {"type": "text", "text": "Which one?"}
    together = llm.embed_multimodal([{"role": "user", "content": [*parts, text]}])
    np.testing.assert_array_equal(np.stack(together), np.stack(alone[::-1]))
    assert llm.embed_multimodal("no picture") == []
    assert llm.engine.compilations == 0


def test_embeddings_are_refused_where_the_cache_cannot_hold_them_at_once(tiny_gemma3: Path):
    prompt: Any = {
        "prompt": f"{IMAGE_START} or {IMAGE_START}?",
        "multi_modal_data": {"image": [draw(40, 30, seed) for seed in range(2)]},
    }
    with open_llm(tiny_gemma3, encoder_cache_size=ROWS, dtype="bfloat16") as small:
        with pytest.raises(RuntimeError, match="holds 1 of the prompt's 2 items"):
            small.embed_multimodal(prompt)
        assert encode(small, draw(40, 30, 0)).dtype == ml_dtypes.bfloat16
