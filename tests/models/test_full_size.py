"""Every family at its published sizes, without weights: each tensor of a checkpoint has one place.

`published.json` has what the hub's config.json files say, where they differ from HF's defaults, and
what follows from it. Names and shapes come from HF's module on torch's meta device, told as the
file layouts do; of families without a class in transformers,
from `tests/families/published_names.py`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import InternVLForConditionalGeneration

from mmjax.errors import CheckpointError
from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.deepseek_vl2.host_inputs import DeepseekVLV2HostInputs
from mmjax.models.florence2.host_inputs import Florence2HostInputs
from mmjax.models.host_inputs import EncoderSpec
from mmjax.models.interface import embed_units
from mmjax.models.internvl.host_inputs import InternVLHostInputs
from mmjax.models.internvl.model import InternVLChatModel
from mmjax.models.qwen2_vl.host_inputs import Qwen25VLHostInputs
from mmjax.models.registry import load_model_class
from mmjax.weights.files.safetensors import StoredTensor, open_safetensors
from mmjax.weights.load import match_tensors
from mmjax.weights.rules import apply_rules
from tests.families import ALL_FAMILIES, published_names
from tests.families.default_run import NAMED_AS_MODULES, NEAR, READ_ELSEWHERE, mark, slow_unless
from tests.families.directories import GOLDEN_MODELS
from tests.families.family import Family
from tests.families.published import Layout, Shapes
from tests.models.original_internvl import original_config, to_original

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text()
)
"""By family and size."""


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint: its family, and its row of `published.json`."""

    name: str

    @property
    def row(self) -> dict[str, Any]:
        return PUBLISHED[self.name]

    @property
    def family(self) -> Family:
        return ALL_FAMILIES[self.row["family"]]

    @property
    def model_class(self) -> Any:
        return load_model_class(self.family.architecture)

    def make_config(self) -> Any:
        config = self.family.make_published_config(json.loads(json.dumps(self.row["config"])))
        # What wrote them: an InternVL's head is tied or not by the version.
        config.transformers_version = "4.52.0.dev0"
        return config


@cache
def build(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return our module, and its tree without values."""
    return build_abstract(checkpoint.model_class, checkpoint.make_config(), dtype=jnp.bfloat16)


@cache
def list_published(checkpoint: Checkpoint) -> Shapes:
    """Return names and shapes, without copies of a tied table."""
    family, config = checkpoint.family, checkpoint.make_config()
    if family.published.list_shapes is not None:
        return family.published.list_shapes(config)
    assert family.tiny is not None
    with torch.device("meta"):
        module = family.tiny.reference_class(config)
    left_out = family.published.left_out if getattr(config, "tie_word_embeddings", True) else ()
    return {
        name: tuple(tensor.shape)
        for name, tensor in module.state_dict().items()
        if not (left_out and name.endswith(left_out))
    }


def tell(name: str, layout: Layout, inner: str) -> str:
    """Return the name that a file of `layout` has for the module's tensor `name`."""
    for old, new in layout.items():
        if name.startswith(old):
            # HF's module may carry the tower's inner name already.
            rest = name.removeprefix(old)
            return new.format(inner=inner) + (rest.removeprefix(inner) if inner else rest)
    return name


def store(shapes: Shapes) -> list[StoredTensor]:
    return [
        StoredTensor(name, "model.safetensors", shape, "BF16", None)
        for name, shape in shapes.items()
    ]


def check_places(tensors: list[StoredTensor], abstract: Any, rules: Any, num_unread: int) -> None:
    """Every tensor has one place and every place one tensor, but for those that nothing reads."""
    # Reports what is missing, unexpected or misshapen, and two tensors for one place.
    sources = match_tensors(tensors, abstract, rules, source="here")
    assert sources.keys() == abstract.keys()
    unread = [one.name for one in tensors if apply_rules(one.name, rules) is None]
    assert len(unread) == num_unread
    # Experts lie apart in files, and together here: what is read once fills the tree exactly.
    read = [one.shape for one in tensors if apply_rules(one.name, rules) is not None]
    places = [leaf.shape for leaf in abstract.values()]
    assert sum(map(math.prod, read)) == sum(map(math.prod, places))


def is_smallest(name: str) -> bool:
    """Return whether a checkpoint is the one that a default run looks at, of its family."""
    family = PUBLISHED[name]["family"]
    sizes = {n: row["num_parameters"] for n, row in PUBLISHED.items() if row["family"] == family}
    return name == min(sizes, key=lambda n: sizes[n])


CHECKPOINTS = [
    # A tree of a large model takes seconds; all sizes are in `make test-slow`. Of families that are
    # near to another one, and of those whose files have no names of their own, `test_array_laws.py`
    # has a small tree, in which each tensor has its place.
    pytest.param(
        Checkpoint(name),
        id=name,
        marks=slow_unless(
            is_smallest(name) and PUBLISHED[name]["family"] not in {*NEAR, *NAMED_AS_MODULES}
        ),
    )
    for name in PUBLISHED
]


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(*one.values, id=one.id, marks=pytest.mark.slow)
        if PUBLISHED[str(one.id)]["family"] in READ_ELSEWHERE
        else one
        for one in CHECKPOINTS
    ],
)
def test_every_tensor_is_used_once_but_for_what_nobody_reads(checkpoint: Checkpoint):
    family, shapes = checkpoint.family, list_published(checkpoint)
    abstract = flatten_params(build(checkpoint)[1])
    rules = checkpoint.model_class.rules(checkpoint.make_config())
    inner = "" if "pixtral" in checkpoint.name else "vision_model."
    num_unread = checkpoint.row.get("num_unread", 0)
    for layout in family.published.layouts.values():
        told = {tell(name, layout, inner): shape for name, shape in shapes.items()}
        assert len(told) == len(shapes)
        check_places(store(told), abstract, rules, num_unread)
    more = store({**shapes, **dict.fromkeys(family.published.unread, (1,))})
    check_places(more, abstract, rules, num_unread + len(family.published.unread))
    total = sum(int(np.prod(leaf.shape)) for leaf in abstract.values())
    # Florence-2's published figure is rounded to two digits.
    published = pytest.approx(
        checkpoint.row["num_parameters"], rel=0.02 if "florence" in checkpoint.name else 0.01
    )
    assert total == published


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(
            *one.values,
            id=one.id,
            marks=[*one.marks, *mark("published shapes", PUBLISHED[str(one.id)]["family"])],
        )
        for one in CHECKPOINTS
    ],
)
def test_a_picture_and_a_step_have_their_shapes(checkpoint: Checkpoint):
    graphdef, params = build(checkpoint)
    host_inputs = checkpoint.model_class.host_inputs(checkpoint.make_config())
    spec = host_inputs.encoder_spec
    *outer, width = expected = tuple(checkpoint.row["rows"])
    if isinstance(spec, EncoderSpec):
        assert spec.tokens_per_unit == outer[-1]
        size, packed = 2, {}
    else:
        size = outer[0] * spec.patches_per_token
        packed = {"segment_ids": jax.ShapeDtypeStruct((size,), jnp.int32)}
    inputs = packed | {
        key: jax.ShapeDtypeStruct((size, *shape), dtype)
        for key, (shape, dtype) in spec.inputs.items()
    }
    rows = jax.eval_shape(lambda p, x: embed_units(bind(graphdef, p), x), params, inputs)
    assert (rows.shape, rows.dtype) == (expected, jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, width // (1 + len(host_inputs.fed_layers))), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, checkpoint.row["vocab"]), jnp.float32)


def of_family(name: str) -> list[Any]:
    return [one for one in CHECKPOINTS if PUBLISHED[str(one.id)]["family"] == name]


@pytest.mark.parametrize("checkpoint", of_family("gemma3"))
def test_gemmas_layers_alternate_as_published(checkpoint: Checkpoint):
    text = checkpoint.make_config().text_config
    is_global = [kind == "full_attention" for kind in text.layer_types]
    assert is_global == [number % 6 == 5 for number in range(text.num_hidden_layers)]
    assert text.rope_parameters["full_attention"]["factor"] == 8.0
    assert text.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0


@pytest.mark.parametrize("checkpoint", of_family("chameleon"))
def test_chameleons_codes_are_found_in_float32(checkpoint: Checkpoint):
    for name, leaf in flatten_params(build(checkpoint)[1]).items():
        assert leaf.dtype == (jnp.float32 if name.startswith("vqmodel.") else jnp.bfloat16)


@pytest.mark.parametrize("checkpoint", of_family("florence2"))
def test_florence2s_prompts_have_their_shapes(checkpoint: Checkpoint):
    graphdef, params = build(checkpoint)
    host_inputs = Florence2HostInputs(checkpoint.make_config())
    assert (host_inputs.num_image_rows, host_inputs.max_encoder_len) == (577, 1024)
    width = checkpoint.row["rows"][-1]
    prompts = jax.ShapeDtypeStruct((2, 1024, width), jnp.bfloat16)
    is_token = jax.ShapeDtypeStruct((2, 1024), jnp.bool)
    states = jax.eval_shape(
        lambda p, *x: bind(graphdef, p).encode_prompts(*x), params, prompts, is_token
    )
    assert (states.shape, states.dtype) == ((2, 1024, width), jnp.bfloat16)


@pytest.mark.parametrize("checkpoint", of_family("internvl"))
def test_internvls_original_layout_has_the_same_places(tmp_path: Path, checkpoint: Checkpoint):
    config, is_internlm2 = checkpoint.make_config(), "is_internlm2" in checkpoint.row
    with torch.device("meta"):
        tensors = InternVLForConditionalGeneration(config).state_dict()
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in to_original(config, tensors, is_internlm2=is_internlm2).items()
    }
    original = original_config(config, tmp_path, is_internlm2=is_internlm2)
    abstract = flatten_params(build(checkpoint)[1])
    check_places(store(shapes), abstract, InternVLChatModel.rules(original), 0)
    spec = InternVLHostInputs(original).encoder_spec
    assert spec == InternVLHostInputs(config).encoder_spec
    if checkpoint.name == "internvl 3-1b":
        _, own = build_abstract(InternVLChatModel, original, dtype=jnp.bfloat16)
        assert {name: leaf.shape for name, leaf in flatten_params(own).items()} == {
            name: leaf.shape for name, leaf in abstract.items()
        }


@pytest.mark.parametrize("checkpoint", of_family("deepseek_vl2"))
def test_deepseeks_latents_are_one_head(checkpoint: Checkpoint):
    graphdef, params = build(checkpoint)
    config = checkpoint.make_config()
    rows = DeepseekVLV2HostInputs(config).embed_rows({"images_spatial_crop": np.array([3, 2])})
    assert len(rows) == 14 * 15 + 1 + 28 * 43
    layers = bind(graphdef, params).kv_cache_spec.layers
    assert len(layers) == config.get_text_config().num_hidden_layers
    # The latent and the key with a position, against keys and values of 10 heads of 128.
    assert (layers[0].num_kv_heads, layers[0].head_dim, layers[0].value_dim) == (
        (10, 128, 128) if checkpoint.name == "deepseek_vl2 tiny" else (1, 576, 512)
    )


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_deepseeks_list_is_the_tiny_files(size: str):
    path = GOLDEN_MODELS / f"deepseek_vl2_{size}"
    with open_safetensors(path) as tensors:
        found = {name: tensor.shape for name, tensor in tensors.items()}
    vision = {"width": 64, "patch_size": 14, "image_size": 76, "layers": 3}
    has_pool = "vision.attn_pool.latent" in found  # left out of two files, to keep them small
    assert has_pool == (size == "tiny")
    config = published_names.load_model_config(str(path)).hf_config
    assert found == published_names.list_deepseek_vl2(config, vision, has_pool=has_pool)


def test_values_that_no_qwen2_5_vl_can_have():
    checkpoint = Checkpoint("qwen2_5_vl 3B")

    def refuse(name: str, value: Any, match: str, make: Callable[[Any], Any]) -> None:
        config = checkpoint.make_config()
        setattr(config.vision_config, name, value)
        with pytest.raises(CheckpointError, match=match):
            make(config)

    def build_it(config: Any) -> Any:
        return build_abstract(checkpoint.model_class, config, dtype=jnp.float32)

    yarn = {"rope_type": "yarn", "rope_theta": 1e4}
    refuse("rope_parameters", yarn, "rope_type` is `yarn`; expected `axial`", build_it)
    refuse("hidden_act", "mish", "`mish`", build_it)
    few = r"`vision_config\.window_size` is 14, less than the 28"
    refuse("window_size", 14, few, Qwen25VLHostInputs)
