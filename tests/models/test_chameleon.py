"""Chameleon's arrays against HF's, live; its published sizes; its requests through the engine."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import ChameleonConfig, GenerationConfig
from transformers import ChameleonForConditionalGeneration as HFModel

from mmjax.errors import CheckpointError
from mmjax.layers.attention.kv_cache import KVCacheSpec
from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.llm import LLM
from mmjax.models.chameleon.model import ChameleonForConditionalGeneration as Model
from mmjax.models.chameleon.model import CodeTokens
from mmjax.models.host_inputs import EncoderSpec, PromptItem
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.parity.reference import generate_reference, load_reference, run_reference
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.sampling_params import SamplingParams
from mmjax.weights.load import match_tensors
from mmjax.weights.safetensors import StoredTensor
from tests.kit import draw, fill_by_name
from tests.models.directories import write_chameleon
from tests.models.served import Served, ask, check_engine
from tests.oracle import assert_close, params_of
from tests.processing.families.chameleon import call_hf

RULES = Model.rules(None)
VOCAB_SIZE, NUM_CODES, TOKENS_PER_IMAGE = 160, 40, 16
IMAGE, BEGIN, END = 2, 3, 4
FIRST_CODE = 100
PICTURE = "picture"
"""In a prompt's parts, which are numbers of random tokens else."""


def name_of_code(code: int) -> str:
    letters = str(code).translate(str.maketrans("0123456789", "ABCDEFGHIJ"))
    return f"IMGIMG{letters}Z"


def vocabulary_map(num_codes: int = NUM_CODES, first: int = FIRST_CODE) -> dict[str, int]:
    """Codes' tokens run backwards, so that a code is not its token's place."""
    codes = {name_of_code(code): first + num_codes - 1 - code for code in range(num_codes)}
    return {"<image>": IMAGE, "<racm3:break>": BEGIN, "<eoss>": END} | codes


def tiny_config(**changes: Any) -> Any:
    """Width 32, two layers of four heads; pictures of 8x8 pixels, 16 codes each."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "vocabulary_map": vocabulary_map(),
        "vq_config": {
            "embed_dim": 8,
            "num_embeddings": NUM_CODES,
            "latent_channels": 8,
            "resolution": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
    }
    return ChameleonConfig(**{**settings, **changes})


def fill(model: Any, seed: int = 0) -> None:
    """Fill a torch model with random numbers; norms' weights lie around 1."""
    fill_by_name(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter += 1.0


@lru_cache
def random_chameleon(name: str = "plain") -> Any:
    """Return HF's tiny Chameleon, whose `generate` never ends a text."""
    model = HFModel(tiny_config(**CONFIGS[name])).eval()
    fill(model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def params_like(reference: Any) -> Any:
    """Return its weights as our tree."""
    _, abstract = build_abstract(Model, reference.config, dtype=jnp.float32)
    return params_of(reference, abstract, RULES)


def draw_sample(config: Any, parts: Sequence[int | str], seed: int = 0) -> Sample:
    """Return a prompt of random words and pictures."""
    generator = np.random.default_rng(seed)
    vq = config.vq_config
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            ids += generator.integers(5, FIRST_CODE, part).tolist()
            continue
        tokens = [BEGIN, *[IMAGE] * TOKENS_PER_IMAGE, END]
        mask = np.array(tokens) == IMAGE
        place = PlaceholderRange(offset=len(ids), length=len(tokens), is_embed=mask)
        pixels = generator.uniform(-1, 1, (vq.in_channels, vq.resolution, vq.resolution))
        items.append(PromptItem(place, {"pixel_values": pixels.astype(np.float32)}))
        ids += tokens
    return Sample(token_ids=np.array(ids, np.int32), items=items)


def torch_inputs(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it."""
    ids = torch.tensor(sample.token_ids, dtype=torch.long)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pixels = [item.tensors["pixel_values"] for item in sample.items]
    return inputs | ({"pixel_values": torch.tensor(np.stack(pixels))} if pixels else {})


ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "norms behind, shared key heads": {"swin_norm": True, "num_key_value_heads": 2},
    "biases, tied, linear rope": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": ROPE,
    },
}
PROMPTS: Sequence[Sequence[int | str]] = (
    (20,),
    (3, PICTURE, 9),
    (PICTURE, PICTURE, 1, PICTURE, 6),
)


@pytest.mark.parametrize("name", CONFIGS)
def test_states_logits_and_tokens_are_hfs(name: str):
    reference = random_chameleon(name)
    ours = PagedModel(Model, reference.config, params_like(reference), 128)
    is_word = np.ones(VOCAB_SIZE, bool)
    is_word[list(range(FIRST_CODE, FIRST_CODE + NUM_CODES))] = False
    for parts in PROMPTS if name == "plain" else PROMPTS[-1:]:
        sample = draw_sample(reference.config, parts)
        inputs = torch_inputs(sample)
        expected, got = run_reference(reference, inputs, RULES), ours.run(sample)
        assert len(expected) >= 2 + 1 + 1, "blocks, norm, logits"
        for states in (expected, got):
            logits = states["logits"]
            assert (logits[:, ~is_word] == np.finfo(np.float32).min).all()
            states["logits"] = logits[:, is_word]
        assert_close(got, expected)
        tokens = ours.generate(sample, 32)
        assert tokens == generate_reference(reference, inputs, 32)


def test_codes_would_be_sampled_if_they_could():
    """The oracle above would not see a mask that masks nothing of interest."""
    reference = random_chameleon()
    graphdef, _ = build_abstract(Model, reference.config, dtype=jnp.float32)
    model = bind(graphdef, params_like(reference))
    hidden = jax.random.normal(jax.random.key(0), (64, 32))
    free = model.language_model.compute_logits(hidden).argmax(-1)
    assert ((free >= FIRST_CODE) & (free < FIRST_CODE + NUM_CODES)).any()


def test_embeddings_are_hfs():
    reference = random_chameleon()
    pixels = np.random.default_rng(0).uniform(-1, 1, (2, 3, 8, 8)).astype(np.float32)
    with torch.no_grad():
        expected = reference.get_image_features(torch.tensor(pixels), return_dict=True)
    graphdef, _ = build_abstract(Model, reference.config, dtype=jnp.float32)
    rows = jax.jit(lambda p, x: bind(graphdef, p).embed_multimodal(x))(
        params_like(reference), pixels
    )
    assert len(np.unique(np.asarray(rows).reshape(32, -1), axis=0)) > 5
    np.testing.assert_array_equal(rows, expected.pooler_output)


def test_what_the_engine_must_know_is_said():
    config = tiny_config(num_key_value_heads=2)
    host_inputs = Model.host_inputs(config)
    assert host_inputs.encoder_spec == EncoderSpec(
        inputs={"pixel_values": ((3, 8, 8), "float32")}, tokens_per_unit=TOKENS_PER_IMAGE
    )
    item = draw_sample(config, [PICTURE]).items[0].tensors
    assert host_inputs.units(item)["pixel_values"].shape == (1, 3, 8, 8)
    assert host_inputs.embed_rows(item) is None
    spec = Model(config, dtype=jnp.float32).kv_cache_spec
    assert spec == KVCacheSpec.alike(2, num_kv_heads=2, head_dim=8)


WORDS = {"<image>": 2, "word": 3}


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (None, "`vocabulary_map` is missing in config.json"),
        (WORDS | {"IMGIMGAZ": 5}, "no token for 2 of the 3 codes .* the first of which is 1"),
        (WORDS | {"IMGIMGxZ": 5}, "has `IMGIMGxZ`, which names no code"),
    ],
)
def test_a_vocabulary_without_codes_is_refused(mapping: Any, words: str):
    with pytest.raises(CheckpointError, match=words):
        CodeTokens.from_map(mapping, 3)


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(CheckpointError, match="`num_attention_heads` is 5; it must divide"):
        build_abstract(Model, tiny_config(num_attention_heads=5), dtype=jnp.float32)


# ---- the published sizes -------------------------------------------------------------------------

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "30b": {
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_attention_heads": 64,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "swin_norm": True,
    },
}
"""What the hub's config.json files say; the rest are defaults, as there."""
NUM_PARAMETERS = {"7b": 7.0e9, "30b": 34.3e9}


@pytest.mark.parametrize("size", PUBLISHED)
def test_every_tensor_is_used_once_and_none_is_left_over(size: str):
    config = ChameleonConfig(
        **PUBLISHED[size], vocabulary_map=vocabulary_map(8192, 4), vq_config={}
    )
    with torch.device("meta"):
        module = HFModel(config)
    # The hub's names are the module's, and so are save_pretrained's.
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    unused = {"model.vqmodel.decoder.conv_in.weight": (512, 256, 3, 3)}
    tensors = [
        StoredTensor(name, "model.safetensors", shape, "BF16", None)
        for name, shape in (shapes | unused).items()
    ]
    graphdef, params = build_abstract(Model, config, dtype=jnp.bfloat16)
    abstract = flatten_params(params)
    sources = match_tensors(tensors, abstract, RULES, source=size)
    assert sources.keys() == abstract.keys()
    used = {tensor.name for tensor in sources.values()}
    assert shapes.keys() - used == {
        f"model.vqmodel.post_quant_conv.{part}" for part in ("weight", "bias")
    }
    assert len(used) == len(sources)
    total = sum(int(np.prod(leaf.shape)) for leaf in abstract.values())
    assert total == pytest.approx(NUM_PARAMETERS[size], rel=0.01)
    for name, leaf in abstract.items():
        assert leaf.dtype == (jnp.float32 if name.startswith("vqmodel.") else jnp.bfloat16)

    width = PUBLISHED[size]["hidden_size"]
    pixels = jax.ShapeDtypeStruct((2, 3, 512, 512), jnp.float32)
    rows = jax.eval_shape(lambda p, x: bind(graphdef, p).embed_multimodal(x), params, pixels)
    assert (rows.shape, rows.dtype) == ((2, 1024, width), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, width), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, 65536), jnp.float32)


# ---- the engine ----------------------------------------------------------------------------------

BATCH: Sequence[Sequence[int | str]] = (
    (PICTURE, 9),
    (11,),
    (1, PICTURE),
    (3, PICTURE, 4, PICTURE, 20),
    (PICTURE, 4),
)


@lru_cache
def served() -> Served:
    reference = random_chameleon()
    return Served(
        model_class=Model,
        hf_config=reference.config,
        params=params_like(reference),
        max_embeds=TOKENS_PER_IMAGE,
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
        norm = flatten_params(core._runner._params)["language_model.layers.0.self_attn.q_norm.bias"]
        assert norm.sharding.shard_shape(norm.shape) == (1, 8), "a head for each device"


# ---- a directory ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chameleon(tmp_path_factory.mktemp("chameleon"))


def test_the_directory_is_served_and_answers_as_hf(checkpoint: Path):
    reference = load_reference(checkpoint, "ChameleonForConditionalGeneration")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    small: dict[str, Any] = {
        "max_model_len": 320,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 128,
    }
    image = draw(81, 37)
    with LLM(checkpoint, use_tqdm_on_load=False, **small) as llm:
        messages = ask(image, "what is in the car")
        (output,) = llm.chat(messages, params, use_tqdm=False)
    inputs = call_hf("<image>\nwhat is in the car", [image], {})
    assert output.prompt_token_ids == inputs.input_ids
    ids = torch.tensor([inputs.input_ids])
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.tensor(np.asarray(inputs.tensors["pixel_values"])),
    }
    assert tuple(output.outputs[0].token_ids) == generate_reference(reference, tensors, 12)
