"""Fuyu's arrays against HF's, live; its published size; its requests through the engine."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, FuyuConfig, GenerationConfig
from transformers import FuyuForCausalLM as HFModel

from mmjax.errors import CheckpointError
from mmjax.layers.attention.kv_cache import KVCacheSpec
from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.llm import LLM
from mmjax.models.fuyu.model import FuyuForCausalLM
from mmjax.models.host_inputs import PackedEncoderSpec, PromptItem
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.parity.reference import generate_reference, run_reference
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.sampling_params import SamplingParams
from mmjax.weights.load import match_tensors
from mmjax.weights.safetensors import StoredTensor
from tests.kit import draw, fill_by_name
from tests.models.directories import write_fuyu
from tests.models.served import Served, ask, check_engine
from tests.oracle import assert_close, params_of
from tests.processing.families.family import golden_processor

IMAGE, NEWLINE, START = 126, 127, 1
Grid = tuple[int, int]
"""Rows and columns of patches."""


def tiny_config(**changes: Any) -> Any:
    """Width 32, two layers of four heads; patches of 5x5 pixels."""
    text = {
        "model_type": "persimmon",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 25000.0,
            "partial_rotary_factor": 0.5,
        },
    }
    own = {name: changes.pop(name) for name in ("num_channels", "patch_size") if name in changes}
    is_tied = changes.pop("tie_word_embeddings", False)
    return FuyuConfig(
        text_config=text | changes | {"tie_word_embeddings": is_tied},
        image_token_id=IMAGE,
        tie_word_embeddings=is_tied,
        **{"patch_size": 5, **own},
    )


def fill(model: Any, seed: int = 0) -> None:
    """Fill a torch model with random numbers; norms' weights lie around 1."""
    fill_by_name(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter += 1.0


@lru_cache
def random_fuyu(**changes: Any) -> Any:
    """Return HF's tiny Fuyu, whose `generate` never ends a text."""
    model = HFModel(tiny_config(**changes)).eval()
    fill(model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def params_like(reference: Any) -> Any:
    """Return its weights as our tree."""
    _, abstract = build_abstract(FuyuForCausalLM, reference.config, dtype=jnp.float32)
    return params_of(reference, abstract, FuyuForCausalLM.rules(reference.config))


def draw_sample(config: Any, parts: Sequence[int | Grid], seed: int = 0) -> Sample:
    """Return a prompt: a number is so many random tokens, a grid a picture as Fuyu writes it."""
    generator = np.random.default_rng(seed)
    width = config.patch_size**2 * config.num_channels
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            ids += generator.integers(2, 120, part).tolist()
            continue
        rows, columns = part
        tokens = [*[*[IMAGE] * columns, NEWLINE] * rows, START]
        place = PlaceholderRange(
            offset=len(ids), length=len(tokens), is_embed=np.array(tokens) == IMAGE
        )
        # A picture is the same wherever it comes, so that caches may find it.
        pixels = np.random.default_rng(part).normal(size=(rows * columns, width))
        tensors = {"image_patches": pixels.astype(np.float32), "image_grid_hw": np.array(part)}
        items.append(PromptItem(place, tensors))
        ids += tokens
    return Sample(token_ids=np.array(ids, np.int32), items=items)


def torch_inputs(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it."""
    ids = torch.tensor(sample.token_ids, dtype=torch.long)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    patches = [item.tensors["image_patches"] for item in sample.items]
    if patches:
        inputs["pixel_values"] = torch.tensor(np.concatenate(patches))[None]
    return inputs


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "no norms of queries and keys": {"qk_layernorm": False},
    "tied": {"tie_word_embeddings": True},
    "grey pictures, one head": {"num_channels": 1, "num_attention_heads": 1},
}
PROMPTS: Sequence[Sequence[int | Grid]] = (
    (20,),
    ((3, 5), 9),
    ((1, 1), 4),
    ((2, 7), 5, (4, 1), 3, (3, 3), 6),
)


@pytest.mark.parametrize("name", CONFIGS)
def test_states_logits_and_tokens_are_hfs(name: str):
    reference = random_fuyu(**CONFIGS[name])
    rules = FuyuForCausalLM.rules(reference.config)
    ours = PagedModel(FuyuForCausalLM, reference.config, params_like(reference), 128)
    for parts in PROMPTS if name == "plain" else PROMPTS[-1:]:
        sample = draw_sample(reference.config, parts)
        inputs = torch_inputs(sample)
        expected = run_reference(reference, inputs, rules)
        assert len(expected) == 2 + 1 + 1, "blocks, norm, logits"
        assert_close(ours.run(sample), expected)
        assert ours.generate(sample, 32) == generate_reference(reference, inputs, 32)


def test_embeddings_are_hfs():
    reference = random_fuyu()
    sample = draw_sample(reference.config, [(4, 6)])
    patches = sample.items[0].tensors["image_patches"]
    with torch.no_grad():
        expected = reference.model.get_image_features(torch.tensor(patches)[None])
    graphdef, _ = build_abstract(FuyuForCausalLM, reference.config, dtype=jnp.float32)
    rows = bind(graphdef, params_like(reference)).embed_multimodal(
        jnp.asarray(patches), jnp.zeros(24, jnp.int32)
    )
    np.testing.assert_allclose(rows, expected.last_hidden_state[0], atol=2e-6)


def test_what_the_engine_must_know_is_said():
    config = tiny_config()
    host_inputs = FuyuForCausalLM.host_inputs(config)
    assert host_inputs.encoder_spec == PackedEncoderSpec(
        inputs={"image_patches": ((75,), "float32")}, patches_per_token=1
    )
    item = draw_sample(config, [(2, 3)]).items[0].tensors
    assert host_inputs.units(item)["image_patches"].shape == (6, 75)
    assert host_inputs.embed_rows(item) is None
    spec = FuyuForCausalLM(config, dtype=jnp.float32).kv_cache_spec
    assert spec == KVCacheSpec.alike(2, num_kv_heads=4, head_dim=8)


def test_another_decoder_is_refused():
    config = tiny_config()
    config.text_config.model_type = "gpt_neox"
    with pytest.raises(CheckpointError, match=r"`text_config\.model_type` is `gpt_neox`"):
        build_abstract(FuyuForCausalLM, config, dtype=jnp.float32)


# ---- the published size --------------------------------------------------------------------------

PUBLISHED = {
    "hidden_act": "relu2",
    "hidden_size": 4096,
    "image_size": 300,
    "intermediate_size": 16384,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 16384,
    "num_attention_heads": 64,
    "num_channels": 3,
    "num_hidden_layers": 36,
    "partial_rotary_factor": 0.5,
    "patch_size": 30,
    "qk_layernorm": True,
    "rope_theta": 25000.0,
    "tie_word_embeddings": False,
    "vocab_size": 262144,
}
"""What config.json of fuyu-8b says, which is flat."""

LAYOUTS = {
    "hub": {
        "model.language_model.": "language_model.model.",
        "model.vision_embed_tokens.": "vision_embed_tokens.",
        "lm_head.": "language_model.lm_head.",
    },
    "module": {},
}
"""How each layout tells a prefix of the module's own names; `save_pretrained` writes the hub's."""


def tell(name: str, layout: str) -> str:
    for old, new in LAYOUTS[layout].items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_used_and_none_is_left_over(layout: str):
    config: Any = FuyuConfig(**PUBLISHED)
    assert config.text_config.rope_parameters["partial_rotary_factor"] == 0.5
    with torch.device("meta"):
        module = HFModel(config)
    tensors = [
        StoredTensor(tell(name, layout), "model.safetensors", tuple(tensor.shape), "BF16", None)
        for name, tensor in module.state_dict().items()
    ]
    abstract = flatten_params(build_abstract(FuyuForCausalLM, config, dtype=jnp.bfloat16)[1])
    sources = match_tensors(tensors, abstract, FuyuForCausalLM.rules(config), source=layout)
    assert sources.keys() == abstract.keys()
    used = [tensor.name for tensor in sources.values()]
    assert set(used) == {tensor.name for tensor in tensors}
    # A fused tensor is three, and all others one.
    assert len(used) == len(tensors) + 2 * 2 * config.text_config.num_hidden_layers
    total = sum(int(np.prod(leaf.shape)) for leaf in abstract.values())
    assert total == pytest.approx(9.4e9, rel=0.01)


def test_a_picture_and_a_step_have_their_shapes():
    config = FuyuConfig(**PUBLISHED)
    graphdef, params = build_abstract(FuyuForCausalLM, config, dtype=jnp.bfloat16)
    patches = jax.ShapeDtypeStruct((128, 2700), jnp.float32)
    ids = jax.ShapeDtypeStruct((128,), jnp.int32)
    rows = jax.eval_shape(
        lambda p, x, s: bind(graphdef, p).embed_multimodal(x, s), params, patches, ids
    )
    assert (rows.shape, rows.dtype) == ((128, 4096), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, 4096), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, 262144), jnp.float32)


# ---- the engine ----------------------------------------------------------------------------------

BATCH: Sequence[Sequence[int | Grid]] = (
    ((3, 5), 9),
    (11,),
    ((1, 1), 4),
    ((2, 7), 5, (4, 1), 30),
    ((3, 5), 4),
)


@lru_cache
def served() -> Served:
    reference = random_fuyu()
    return Served(
        model_class=FuyuForCausalLM,
        hf_config=reference.config,
        params=params_like(reference),
        max_embeds=40,
    )


@lru_cache
def batch() -> list[Sample]:
    return [draw_sample(served().hf_config, parts) for parts in BATCH]


@lru_cache
def expected_answers() -> list[list[int]]:
    return served().answer_alone(batch())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_batched_tokens": 7, "num_blocks": 11}, id="chunks, preempted"),
        pytest.param({"num_blocks": 11}, id="whole prompts, preempted", marks=pytest.mark.slow),
        pytest.param({"size": 2}, id="two devices", marks=pytest.mark.slow),
        pytest.param({"size": 4, "max_num_seqs": 1}, id="four devices"),
    ],
)
def test_answers_are_those_of_one_pass(settings: dict[str, Any]):
    core = served().engine(**settings)
    check_engine(core, batch(), expected_answers())
    assert bool(core.num_preemptions) == ("num_blocks" in settings)
    if settings.get("size") == 4:
        check_shards(flatten_params(core._runner._params))


def check_shards(params: Mapping[str, Any]) -> None:
    """Each of four devices holds a head, and its part of the MLP."""
    layer = "language_model.layers.0.{}"
    cut = ("self_attn.q_proj.bias", "self_attn.v_proj.weight", "self_attn.dense.weight")
    cut += ("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias", "mlp.dense_4h_to_h.weight")
    shapes = {
        name: params[layer.format(name)].sharding.shard_shape(params[layer.format(name)].shape)
        for name in cut
    }
    assert shapes == {
        "self_attn.q_proj.bias": (8,),
        "self_attn.v_proj.weight": (8, 32),
        "self_attn.dense.weight": (32, 8),
        "mlp.dense_h_to_4h.weight": (16, 32),
        "mlp.dense_h_to_4h.bias": (16,),
        "mlp.dense_4h_to_h.weight": (32, 16),
    }


# ---- a directory ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fuyu(tmp_path_factory.mktemp("fuyu"))


def test_the_directory_is_served_and_answers_as_hf(checkpoint: Path):
    reference = HFModel.from_pretrained(checkpoint, dtype="float32").eval()
    reference.generation_config = GenerationConfig(pad_token_id=0)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    small = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    image, text = draw(81, 37), "what is in the car"
    with LLM(checkpoint, use_tqdm_on_load=False, **small) as llm:
        messages = [ask(image, text), ask(None, text)]
        outputs = llm.chat(messages, params, use_tqdm=False)
    processor = golden_processor("fuyu", path=checkpoint)
    for data, output in zip(({"image": image}, {}), outputs, strict=True):
        made = processor.apply(f"{text}\n", data)
        inputs = {"input_ids": torch.tensor([made.prompt_token_ids])}
        assert output.prompt_token_ids == made.prompt_token_ids
        if made.mm_kwargs:
            patches = made.mm_kwargs.get_data()["image_patches"]
            inputs["pixel_values"] = torch.tensor(np.asarray(patches))[None]
        expected = generate_reference(reference, inputs, 12)
        assert tuple(output.outputs[0].token_ids) == expected


def test_what_save_pretrained_writes_is_loaded(tmp_path: Path):
    reference = random_fuyu()
    reference.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"]
    ours = PagedModel.from_directory(
        tmp_path, FuyuForCausalLM, AutoConfig.from_pretrained(tmp_path), max_len=64
    )
    expected, got = flatten_params(params_like(reference)), flatten_params(ours.params)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
