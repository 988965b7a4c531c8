"""`LLM` with `runner="pooling"` on checkpoints that generate: vectors are HF's, whatever is beside.

HF's states of the same prompt are `output_hidden_states[-1]` of its class, in float32.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax import LLM, PoolingParams, SamplingParams
from mmjax.errors import ConfigError, RequestValueError
from mmjax.parity.reference import load_reference
from tests.families import FAMILIES
from tests.kit import draw
from tests.models.pooled import last_states, normalized

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "use_tqdm_on_load": False,
}
START = "here are the picture and some crops to help you see better how many red shapes there are "
"""More than a block of the KV cache."""
WHOLE = {"max_num_seqs": 3, "max_num_batched_tokens": 256}
"""Room for all prompts in one step."""
FAMILY = FAMILIES["qwen2_vl"]
TEXTS: list[tuple[str, list[Any]]] = [
    (f"{START}which color", []),
    (f"{START}{FAMILY.placeholder} which color is the circle", [draw(90, 70, 0)]),
    (f"{START}{FAMILY.placeholder * 2} which color", [draw(60, 90, 1), draw(90, 70, 0)]),
]
PROMPTS: list[Any] = [
    {"prompt": text, "multi_modal_data": {"image": images} if images else {}}
    for text, images in TEXTS
]


@pytest.fixture(scope="module")
def states() -> list[np.ndarray]:
    """HF's states of each prompt."""
    reference = load_reference(FAMILY.checkpoint, FAMILY.architecture)
    return [last_states(reference, FAMILY, *one) for one in TEXTS]


def open_llm(**settings: Any) -> LLM:
    return LLM(FAMILY.checkpoint, runner="pooling", **{**SETTINGS, **settings})


def embed(llm: LLM, prompts: list[Any], **options: Any) -> np.ndarray:
    outputs = llm.embed(prompts, use_tqdm=False, **options)
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def encode(llm: LLM, prompts: list[Any], **options: Any) -> list[np.ndarray]:
    task = {"pooling_task": "token_embed", **options}
    return [one.outputs.data for one in llm.encode(prompts, use_tqdm=False, **task)]


def test_vectors_are_hfs(states: list[np.ndarray]) -> None:
    """Of the last token, of each token, of their mean; as they are, or of length 1."""
    expected = np.stack([normalized(one[-1]) for one in states])
    with open_llm(precompile="all") as llm:
        np.testing.assert_allclose(embed(llm, PROMPTS), expected, rtol=0, atol=1e-4)
        plain = embed(llm, PROMPTS, pooling_params=PoolingParams(use_activation=False))
        np.testing.assert_allclose(plain, [one[-1] for one in states], rtol=0, atol=1e-4)
        for found, one in zip(encode(llm, PROMPTS), states, strict=True):
            np.testing.assert_allclose(found, normalized(one), rtol=0, atol=1e-4)
        (output,) = llm.encode(PROMPTS[1], use_tqdm=False)
        assert output.outputs.data.shape == (64,)
        assert output.outputs.data.dtype == np.float32
        assert len(output.prompt_token_ids) == len(states[1])
        cosines = expected[1:] @ expected[0]
        for params in (None, PoolingParams(use_activation=False)):
            options: dict[str, Any] = {"use_tqdm": False, "pooling_params": params}
            (first, second) = llm.score(PROMPTS[0], PROMPTS[1:], **options)
            assert [first.outputs.score, second.outputs.score] == pytest.approx(cosines, abs=1e-4)
        assert llm.engine.compilations == 0
    with open_llm(pooler_config={"pooling_type": "MEAN"}) as llm:
        means = [normalized(one.mean(0)) for one in states]
        np.testing.assert_allclose(embed(llm, PROMPTS), means, rtol=0, atol=1e-4)


@pytest.mark.slow  # of the engine by default: `test_the_same_bits` in tests/engine/test_pooling.py
def test_the_same_bits_whatever_is_beside() -> None:
    """In chunks of 7 and whole, one by one and at once, with cold and warm caches."""
    with open_llm() as llm:
        alone = [embed(llm, [one])[0] for one in PROMPTS]
        tokens = [encode(llm, [one])[0] for one in PROMPTS]
        mean = PoolingParams(pooling_type="MEAN")
        means = [embed(llm, [one], pooling_params=mean)[0] for one in PROMPTS]
        assert llm.engine.stats().prefix_cache_hits > 0, "the last token's vector takes a prefix"
    for settings in ({"max_num_batched_tokens": 7}, WHOLE):
        with open_llm(**settings) as llm:
            for _ in ("cold", "warm"):
                np.testing.assert_array_equal(embed(llm, PROMPTS), alone)
                np.testing.assert_array_equal(embed(llm, PROMPTS, pooling_params=mean), means)
                for found, expected in zip(encode(llm, PROMPTS), tokens, strict=True):
                    np.testing.assert_array_equal(found, expected)


def test_a_prefix_is_taken_where_one_vector_is_wanted_and_no_other() -> None:
    with open_llm() as llm:
        (first,) = llm.embed(PROMPTS[0], use_tqdm=False)
        (again,) = llm.embed(PROMPTS[0], use_tqdm=False)
        (tokens,) = llm.encode(PROMPTS[0], use_tqdm=False, pooling_task="token_embed")
        assert (first.num_cached_tokens, tokens.num_cached_tokens) == (0, 0)
        assert again.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dimensions", 8.0, "give an integer"),
        ("dimensions", True, "give an integer"),
        ("use_activation", "false", "give true or false"),
        ("use_activation", 0, "give true or false"),
    ],
)
def test_parameters_of_wrong_types_are_named(field: str, value: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"`{field}` is .*; {says}"):
        PoolingParams(**{field: value})


def test_what_cannot_be_is_refused(tiny_gemma3: Path) -> None:
    with pytest.raises(ConfigError, match="`pooler_config` is of no use"):
        LLM(str(tiny_gemma3), pooler_config={"pooling_type": "MEAN"}, use_tqdm_on_load=False)
    for wrong, reason in (
        ({"pooling_type": "CLS"}, "pooling_type` is 'CLS'; expected one of LAST, MEAN"),
        ({"pool": "LAST"}, "has a field `pool`"),
        ({"dimensions": 8}, "was not trained to have its vectors cut"),
        ({"use_activation": 1}, "give true or false"),
    ):
        with pytest.raises(ConfigError, match=reason):
            LLM(str(tiny_gemma3), runner="pooling", pooler_config=wrong, use_tqdm_on_load=False)
    with (
        LLM(str(tiny_gemma3), use_tqdm_on_load=False, max_model_len=64) as llm,
        pytest.raises(RequestValueError, match="--runner pooling"),
    ):
        llm.embed("a star", use_tqdm=False)
    with LLM(str(tiny_gemma3), runner="pooling", use_tqdm_on_load=False, max_model_len=64) as llm:
        with pytest.raises(RequestValueError, match="generates no text"):
            llm.generate("a star", SamplingParams(max_tokens=1), use_tqdm=False)
        with pytest.raises(RequestValueError, match="was not trained to have its vectors cut"):
            llm.embed("a star", pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        with pytest.raises(RequestValueError, match="has 2 prompts and `data_2` 3"):
            llm.score(["a"] * 2, ["b"] * 3, use_tqdm=False)
        wrong_params: Any = [PoolingParams()]
        for ask in (llm.embed, llm.encode, partial(llm.score, "a red")):
            with pytest.raises(TypeError, match="`pooling_params` is a list; give a PoolingParams"):
                ask("a star", pooling_params=wrong_params, use_tqdm=False)
        assert llm.score([], [], use_tqdm=False) == []
        (found,) = llm.embed("a star", use_tqdm=False)
        assert np.linalg.norm(found.outputs.embedding) == pytest.approx(1)


def test_vectors_are_cut_where_the_model_may(tiny_gemma3: Path, tmp_path: Path) -> None:
    from shutil import copytree

    from tests.families.directories import edit_json

    path = copytree(tiny_gemma3, tmp_path / "cut")
    edit_json(path / "config.json", {"matryoshka_dimensions": [8, 16]})
    with LLM(str(path), runner="pooling", use_tqdm_on_load=False, max_model_len=64) as llm:
        whole = np.array(llm.embed("a star", use_tqdm=False)[0].outputs.embedding)
        cut = PoolingParams(dimensions=8)
        (found,) = llm.embed("a star", use_tqdm=False, pooling_params=cut)
        np.testing.assert_allclose(found.outputs.embedding, normalized(whole[:8]), atol=1e-6)
        with pytest.raises(RequestValueError, match=r"`dimensions` is 9; .* one of \[8, 16\]"):
            llm.embed("a star", use_tqdm=False, pooling_params=PoolingParams(dimensions=9))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    path = FAMILIES["florence2"].write(tmp_path)
    with pytest.raises(ConfigError, match="is an encoder-decoder"):
        LLM(str(path), runner="pooling", use_tqdm_on_load=False)
