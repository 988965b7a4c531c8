"""Embeddings with their grids: in every form they give the answers of the images themselves."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save

from mmjax import LLM, SamplingParams
from mmjax.errors import RequestError
from mmjax.parity.reference import load_reference
from tests.families import FAMILIES
from tests.families.qwen2_vl import IMAGE, hf_processor
from tests.kit import draw
from tests.test_serve import SMALL, Served, ask_for_logprobs, message_about

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = {"max_model_len": 256, "max_num_seqs": 1, "max_num_batched_tokens": 64}
IMAGES = [draw(90, 60), draw(60, 140, 1), draw(30, 30, 2)]
WIDTH = 64


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def checkpoint(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    """A directory, and HF's model of it; one of windows, whose rows come in another order."""
    family = FAMILIES[request.param]
    return family.checkpoint, load_reference(family.checkpoint, family.architecture)


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(
        str(checkpoint[0]),
        enable_mm_embeds=True,
        use_tqdm_on_load=False,
        **SIZES,
    ) as llm:
        yield llm


def embed(reference: Any, image: Any) -> dict[str, np.ndarray]:
    """Return what HF's own tower gives, and the grid."""
    inputs = hf_processor()(text=IMAGE, images=[image], return_tensors="pt")
    pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.no_grad():
        (rows,) = reference.get_image_features(pixels, grid).pooler_output
    return {"image_embeds": rows.numpy(), "image_grid_thw": grid[0].numpy()}


def answer(llm: LLM, images: Any, number: int = 1) -> tuple[list[int], list[int]]:
    data: Any = {"prompt": f"look {IMAGE * number} what?", "multi_modal_data": {"image": images}}
    (output,) = llm.generate(data, GREEDY, use_tqdm=False)
    return list(output.prompt_token_ids), list(output.outputs[0].token_ids)


def chat(llm: LLM, *parts: Any) -> tuple[list[int], list[int]]:
    content = [*parts, {"type": "text", "text": "what color?"}]
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    return list(output.prompt_token_ids), list(output.outputs[0].token_ids)


def join(embeds: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {
        "image_embeds": np.concatenate([one["image_embeds"] for one in embeds]),
        "image_grid_thw": np.stack([one["image_grid_thw"] for one in embeds]),
    }


def test_a_dict_of_one_and_of_several(llm: LLM, checkpoint: tuple[Path, Any]):
    embeds = [embed(checkpoint[1], image) for image in IMAGES]
    answers = [answer(llm, image) for image in IMAGES]
    assert [answer(llm, join([one])) for one in embeds] == answers
    assert len({str(tokens) for _, tokens in answers}) > 1
    assert answer(llm, join(embeds[:2]), 2) == answer(llm, IMAGES[:2], 2)
    assert llm.engine.compilations == 0


def encode(rows: np.ndarray) -> str:
    return base64.b64encode(save({"rows": rows})).decode()


def part_of(rows: Any, grid: Any) -> dict[str, Any]:
    embeds = {"image_embeds": rows, "image_grid_thw": grid}
    return {"type": "image_embeds", "image_embeds": embeds}


def test_parts_of_a_conversation(llm: LLM, checkpoint: tuple[Path, Any]):
    embeds = [embed(checkpoint[1], image) for image in IMAGES[:2]]
    wanted = chat(llm, *({"type": "image_pil", "image_pil": image} for image in IMAGES[:2]))
    (rows, grid), (other_rows, other_grid) = [one.values() for one in embeds]
    forms = [
        part_of(rows, grid),
        part_of(jnp.asarray(rows)[None], grid[None].tolist()),
        part_of(torch.from_numpy(rows), torch.from_numpy(grid)),
        part_of(encode(rows), grid.tolist()),
    ]
    for form in forms:
        assert chat(llm, form, part_of(other_rows, other_grid)) == wanted
    halves = [one.astype(np.float16) for one in (rows, other_rows)]
    mixed = [part_of(halves[0], grid), part_of(jnp.asarray(halves[1], jnp.bfloat16), other_grid)]
    assert chat(llm, *mixed)[0] == wanted[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((4, WIDTH), np.float32), "must be an object of `image_embeds` and `image_grid"),
        ({"image_embeds": np.zeros((4, WIDTH))}, r"object of .*, not of \['image_embeds'\]"),
        (part_of(np.zeros((4, WIDTH)), [1, 4])["image_embeds"], r"shape \(1, 2\); expected"),
        (part_of(np.zeros((4, WIDTH)), [1, 4, 5])["image_embeds"], "multiples of 2"),
        (part_of(np.zeros((4, WIDTH)), [1, 4, 6])["image_embeds"], "4 rows, its items have 6"),
        (part_of(np.zeros((4, WIDTH)), [1, 4, 2**16])["image_embeds"], "integers from 0 to 65535"),
        (part_of(np.zeros((4, WIDTH)), [1, True, 4])["image_embeds"], "list of integers"),
        (part_of(np.zeros((4, WIDTH)), "AAAA")["image_embeds"], "list of integers"),
        (part_of(np.zeros((4, 8)), [1, 4, 4])["image_embeds"], "got 8, the model has 64"),
    ],
)
def test_what_does_not_fit_is_named(llm: LLM, value: Any, words: str):
    with pytest.raises(RequestError, match=words) as caught:
        chat(llm, {"type": "image_embeds", "image_embeds": value})
    assert caught.value.status == 400
    assert str(caught.value.param).startswith("messages[0].content[0]")


def test_an_id_alone_is_no_grid(llm: LLM):
    with pytest.raises(RequestError, match="must be an object of"):
        chat(llm, {"type": "image_embeds", "image_embeds": None, "uuid": "one"})


@pytest.mark.slow  # embeddings over HTTP are in `test_serve.py`, of the default model
@pytest.mark.parametrize("checkpoint", ["qwen2_vl"], indirect=True)
def test_over_http(checkpoint: tuple[Path, Any]):
    """Two processes; the rows are HF's, so that log-probabilities differ in their last bits."""
    path, reference = checkpoint
    server = Served(str(path), *SMALL, "--enable-mm-embeds")
    try:
        url = server.wait_for(r"mmjax serving tiny at (http://127\.0\.0\.1:\d+)\n").group(1)
        texts = set()
        for image in IMAGES:
            message = message_about(image, "what color?")
            (wanted,) = ask_for_logprobs(url, message)
            given = embed(reference, image)
            rows, grid = encode(given["image_embeds"]), given["image_grid_thw"].tolist()
            message["content"][0] = part_of(rows, grid)
            (found,) = ask_for_logprobs(url, message)
            assert found["message"] == wanted["message"]
            values = [
                [one["logprob"] for one in choice["logprobs"]["content"]]
                for choice in (found, wanted)
            ]
            np.testing.assert_allclose(*values, rtol=0, atol=1e-4)
            texts.add(wanted["message"]["content"])
        assert len(texts) > 1
    finally:
        server.end()
