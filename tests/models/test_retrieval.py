"""ColQwen2 and ColPali: ids, pixels, vectors and scores are those of HF's classes, in float32."""

from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

from mmjax import LLM, SamplingParams
from mmjax.errors import ConfigError, RequestValueError
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.reference import make_pixels
from tests.families.directories import edit_json, made_once
from tests.families.retrieval import EMBEDDING_DIM, RETRIEVAL, Retrieval, run_hf
from tests.kit import draw

QUERIES = ["which color is the circle", "two cats\nand a car", "x"]
PICTURES = [draw(90, 70, 0), draw(60, 120, 1)]
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "use_tqdm_on_load": False,
}
PROMPTS: list[Any] = [
    *QUERIES,
    *({"prompt": "", "multi_modal_data": {"image": picture}} for picture in PICTURES),
]
ROWS = [pytest.param(row, id=row.name) for row in RETRIEVAL]


@cache
def checkpoint(row: Retrieval) -> Path:
    return made_once(row.write)()


@cache
def ask_hf(row: Retrieval) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Return HF's inputs of each prompt, and its vectors [T, D]."""
    processor = row.load_processor(checkpoint(row))
    model = row.model_class.from_pretrained(checkpoint(row)).eval()
    inputs = [dict(processor.process_queries([text])) for text in QUERIES]
    inputs += [dict(processor.process_images([picture])) for picture in PICTURES]
    return inputs, [run_hf(model, one)[0] for one in inputs]


def encode(llm: LLM, prompts: list[Any]) -> list[np.ndarray]:
    return [one.outputs.data for one in llm.encode(prompts, use_tqdm=False)]


@pytest.mark.parametrize("row", ROWS)
def test_ids_and_pixels_are_hfs(row: Retrieval) -> None:
    path = checkpoint(row)
    processor: Any = create_processor(load_model_config(str(path)))
    inputs, _ = ask_hf(row)
    for prompt, hf in zip(PROMPTS, inputs, strict=True):
        text = prompt if isinstance(prompt, str) else prompt["prompt"]
        data = {} if isinstance(prompt, str) else prompt["multi_modal_data"]
        given = processor.apply(text, data)
        assert given.prompt_token_ids == hf["input_ids"][0].tolist()
        if not data:
            continue
        (item,) = given.mm_kwargs["image"]
        pixels = make_pixels(item.get_data())["pixel_values"]
        expected = hf["pixel_values"].numpy()
        np.testing.assert_allclose(pixels, expected.reshape(pixels.shape), rtol=0, atol=1e-6)


# A whole prompt that sees itself is in an engine of PaliGemma's in `test_hf_answers.py`, too.
IN_DEFAULT_RUN = {"colqwen2"}


@pytest.mark.parametrize(
    "row",
    [
        one
        if one.id in IN_DEFAULT_RUN
        else pytest.param(*one.values, id=one.id, marks=pytest.mark.slow)
        for one in ROWS
    ],
)
def test_vectors_and_scores_are_hfs(row: Retrieval) -> None:
    """In chunks, with pictures and texts in one batch, cold and warm; each token's has length 1."""
    _, expected = ask_hf(row)
    processor = row.load_processor(checkpoint(row))
    chunk = {} if row.sees_itself else {"max_num_batched_tokens": 7}
    with LLM(checkpoint(row), **{**SETTINGS, **chunk, "precompile": "all"}) as llm:
        assert llm.config.model.pools
        found = encode(llm, PROMPTS)
        largest = 0.0
        for vectors, hf in zip(found, expected, strict=True):
            assert vectors.shape == (len(hf), EMBEDDING_DIM)
            largest = max(largest, float(np.abs(vectors - hf.numpy()).max()))
        print(f"{row.name}: the largest difference to HF's vectors is {largest:.1e}")
        assert largest <= 1e-4
        for vectors, again in zip(found, encode(llm, PROMPTS), strict=True):
            np.testing.assert_array_equal(vectors, again)
        queries, pages = expected[: len(QUERIES)], expected[len(QUERIES) :]
        for number, query in enumerate(QUERIES):
            scored = llm.score(query, PROMPTS[len(QUERIES) :], use_tqdm=False)
            hf_scores = [
                processor.score_retrieval([queries[number]], [page]).item() for page in pages
            ]
            assert [one.outputs.score for one in scored] == pytest.approx(hf_scores, abs=1e-4)
        part = {"type": "image_pil", "image_pil": PICTURES[0]}
        (by_part,) = llm.score(QUERIES[0], {"content": [part]}, use_tqdm=False)
        (by_prompt,) = llm.score(QUERIES[0], PROMPTS[len(QUERIES)], use_tqdm=False)
        assert by_part.outputs == by_prompt.outputs
        (by_ids,) = llm.encode({"prompt_token_ids": by_part.prompt_token_ids[:7]}, use_tqdm=False)
        assert by_ids.prompt_token_ids == by_part.prompt_token_ids[:7]
        assert llm.engine.compilations == 0
        check_refusals(llm)
    with LLM(checkpoint(row), **SETTINGS) as whole:
        for prompt, vectors in zip(PROMPTS, found, strict=True):
            np.testing.assert_array_equal(encode(whole, [prompt])[0], vectors)


def check_refusals(llm: LLM) -> None:
    picture = {"image": PICTURES[0]}
    with pytest.raises(RequestValueError, match="generates no text"):
        llm.generate("which color", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(RequestValueError, match="none for a whole prompt"):
        llm.embed("which color", use_tqdm=False)
    for text in ("which color", "which <image>"):
        asked: Any = {"prompt": text, "multi_modal_data": picture}
        with pytest.raises(RequestValueError, match="a picture and a text"):
            llm.encode(asked, use_tqdm=False)


@pytest.mark.parametrize("row", ROWS)
def test_prefixes_are_the_checkpoints(row: Retrieval, tmp_path: Path) -> None:
    path = Path(copytree(checkpoint(row), tmp_path / "other"))
    edit_json(path / "processor_config.json", {"query_prefix": "Find: "})
    processor: Any = create_processor(load_model_config(str(path)))
    hf = row.load_processor(path).process_queries(["a star"])
    assert processor.apply("a star", {}).prompt_token_ids == hf["input_ids"][0].tolist()
    with pytest.raises(ConfigError, match="gives vectors, and no text"):
        load_model_config(str(path), runner="generate")
