"""BLIP-2 with T5: buckets of distances, a directory through `LLM` and parity, a head of its own."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.models.t5.modeling_t5 import T5Attention

from mmjax import LLM, SamplingParams
from mmjax.errors import CheckpointError
from mmjax.language.encoder_decoder.t5 import find_buckets
from mmjax.layers.attention.dense import dense_attention
from mmjax.layers.module import build_abstract
from mmjax.models.blip2.model import Blip2T5ForConditionalGeneration as Model
from mmjax.models.model_source import load_model_config
from mmjax.parity.arrays import PagedModel
from mmjax.parity.case import Case, Parity
from mmjax.parity.compare import TOLERANCE
from mmjax.parity.reference import generate_reference, load_reference, run_reference
from tests.families.blip2_t5 import BLIP2_T5, TINY, fill, hf_processor, tiny_config, write_files
from tests.families.directories import save_weights
from tests.families.tiny import Media, TinyModel, Words
from tests.kit import draw
from tests.oracle import assert_close

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 12), (64, 300)])
def test_buckets_are_hfs(num_buckets: int, max_distance: int):
    distances = np.arange(1000)
    for is_bidirectional, number in ((False, num_buckets), (True, num_buckets // 2)):
        expected = T5Attention._relative_position_bucket(
            -torch.tensor(distances),
            bidirectional=is_bidirectional,
            num_buckets=num_buckets,
            max_distance=max_distance,
        )
        found = find_buckets(distances, number, max_distance)
        np.testing.assert_array_equal(found, expected.numpy())


def test_a_bias_is_added_to_scores_of_grouped_heads():
    """Head by head, before the mask."""
    generator = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(generator.standard_normal((2, 5, heads, 8)), jnp.float32) for heads in (4, 2, 2)
    )
    bias = jnp.asarray(generator.standard_normal((4, 5, 5)), jnp.float32)
    mask = jnp.asarray(generator.random((2, 5, 5)) < 0.8) | jnp.eye(5, dtype=bool)[None]
    found = dense_attention(query, key, value, mask=mask, scale=0.5, bias=bias)
    for head in range(4):
        scores = jnp.einsum("bth,bsh->bts", query[:, :, head], key[:, :, head // 2]) * 0.5
        scores = jnp.where(mask, scores + bias[head][None], -jnp.inf)
        expected = jax.nn.softmax(scores, axis=-1) @ value[:, :, head // 2]
        np.testing.assert_allclose(found[:, :, head], expected, rtol=0, atol=1e-5)


def test_answers_of_a_directory_are_hfs():
    """In chunks and whole, cold and warm; a conversation, too."""
    checkpoint = BLIP2_T5.checkpoint
    pictures = [draw(90, 70), draw(37, 211, 1)]
    cases = [(text, one) for text in ("what color is the circle", "is it") for one in pictures]
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": one}} for text, one in cases
    ]
    reference = load_reference(checkpoint, "Blip2ForConditionalGeneration")

    def ask_hf(text: str, picture: Any) -> list[int]:
        inputs = hf_processor()(text=[text], images=[picture], return_tensors="pt")
        return list(generate_reference(reference, dict(inputs), NUM_TOKENS))

    expected = [ask_hf(*case) for case in cases]
    assert len({str(answer) for answer in expected}) == len(expected)
    with LLM(checkpoint, use_tqdm_on_load=False, **BLIP2_T5.llm_settings) as llm:
        for _ in ("cold", "warm"):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in outputs] == expected
        content: list[Any] = [
            {"type": "image_pil", "image_pil": pictures[0]},
            {"type": "text", "text": "what color is the circle"},
        ]
        (chat,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        assert list(chat.outputs[0].token_ids) == ask_hf(str(chat.prompt), pictures[0])
        text_alone = llm.generate(["what color is the circle"], GREEDY, use_tqdm=False)
        assert llm.engine.compilations == 0
    assert list(text_alone[0].outputs[0].token_ids) not in expected


@pytest.mark.slow  # answers of the same directory are compared above
def test_parity_says_yes():
    parity = Parity(load_model_config(str(BLIP2_T5.checkpoint)), max_len=64)
    assert parity.takes_images(1)
    report = parity.run(Case(name="one", prompt="what is it", images=[draw(90, 70)]), max_tokens=16)
    assert report.is_within(TOLERANCE)
    names = {difference.name for difference in report.differences}
    assert {"encoder.norm", "language_model.norm", "qformer.encoder.layer.1"} <= names


def test_a_head_of_its_own_is_read_as_in_hf(tmp_path: Path):
    """T5 1.1's: transformers 5 says that it is the table, and goes by the files."""
    path = save_weights(write_files(tmp_path), fill)
    tied = load_model_config(str(path)).hf_config
    assert tied.text_config.tie_word_embeddings
    tensors = load_file(path / "model.safetensors")
    head = tensors["language_model.shared.weight"][::-1] * np.float32(0.5)
    tensors["language_model.lm_head.weight"] = np.ascontiguousarray(head)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = load_model_config(str(path)).hf_config
    assert not config.text_config.tie_word_embeddings
    ours = PagedModel.from_directory(path, Model, config, max_len=64)
    reference = load_reference(path, "Blip2ForConditionalGeneration")
    sample = TinyModel(TINY).draw_sample((Media(1), Words(1, 7), Words(2, 5)))
    inputs = TINY.torch_inputs(reference, sample)
    ids = inputs["input_ids"]
    inputs["input_ids"] = torch.where(ids == 120, config.image_token_index, ids)
    assert_close(ours.run(sample), run_reference(reference, inputs, Model.rules(config)))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"text": {"n_positions": 5}}, "`num_query_tokens` is 5, and the encoder takes 5"),
        ({"text": {"feed_forward_proj": "gated-mish"}}, "activation `mish` is unknown"),
    ],
)
def test_configs_that_are_not_served(settings: dict[str, Any], match: str):
    with pytest.raises(CheckpointError, match=match):
        build_abstract(Model, tiny_config(**settings), dtype=jnp.float32)
