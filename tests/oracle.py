"""What parity tests share: HF's models of tiny random configs, and their weights in our trees."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from mmjax.layers.module import Params, flatten_params, unflatten_params
from mmjax.models.host_inputs import PromptItem
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.weights.rules import Part, RuleTypes, map_tensor
from tests.kit import fill_by_name, gemma_tokenizer, tiny_gemma3_config

TOLERANCE = 2e-5
"""What tiny models reach in float32; the promise is 1e-4."""


def params_of(
    model: torch.nn.Module, abstract: Params, rules: Sequence[RuleTypes]
) -> dict[Any, Any]:
    """Return the torch model's weights as our tree: every tensor used, none left over."""
    expected = flatten_params(abstract)
    leaves = {}
    for name, tensor in model.state_dict().items():
        for mapped, part in map_tensor(name, rules):
            if mapped.endswith("lm_head.weight") and mapped not in expected:
                continue
            assert mapped not in leaves, name
            array = part.cut(tensor.numpy()) if isinstance(part, Part) else tensor.numpy()
            assert array.shape == expected[mapped].shape, name
            leaves[mapped] = jnp.asarray(array)
    assert leaves.keys() == expected.keys()
    return unflatten_params(leaves)


def assert_close(
    ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], atol: float = TOLERANCE
) -> None:
    """Compare by name; say how far every name is apart if one is too far."""
    assert ours.keys() >= reference.keys(), reference.keys() - ours.keys()
    far = {name: float(np.abs(ours[name] - value).max()) for name, value in reference.items()}
    scale = {name: max(1.0, float(np.abs(value).max())) for name, value in reference.items()}
    assert all(far[name] <= atol * scale[name] for name in far), far


def fill_with_unit_norms(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill a torch model as `fill_by_name` does, norms near 1 where their weight is not centred."""
    fill_by_name(model, seed)
    for module in model.modules():
        name = type(module).__name__
        weight = getattr(module, "weight", None)
        is_norm = name.endswith("Norm") and not name.startswith("Gemma")
        if is_norm and isinstance(weight, torch.Tensor) and weight.mean() < 0.5:
            with torch.no_grad():
                weight += 1.0


def random_gemma3(
    *,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    tokens_per_image: int = 4,
    is_tied: bool = True,
    seed: int = 0,
) -> Any:
    """Return HF's tiny Gemma 3 with random weights, whose `generate` never ends a text."""
    from transformers import Gemma3ForConditionalGeneration, GenerationConfig

    config = tiny_gemma3_config(
        gemma_tokenizer(), text=text, vision=vision, tokens_per_image=tokens_per_image
    )
    config.tie_word_embeddings = is_tied
    config.text_config.tie_word_embeddings = is_tied
    model = Gemma3ForConditionalGeneration(config).eval()
    fill_by_name(model, seed)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def paged_gemma3(reference: Any, max_len: int = 256) -> PagedModel:
    """Return our model with the weights of `random_gemma3`'s."""
    from mmjax.layers.module import build_abstract
    from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration

    model_class = Gemma3ForConditionalGeneration
    _, abstract = build_abstract(model_class, reference.config, dtype=jnp.float32)
    params = params_of(reference, abstract, model_class.rules(reference.config))
    return PagedModel(model_class, reference.config, params, max_len)


def draw_sample(config: Any, texts: Sequence[int], seed: int = 0) -> Sample:
    """Return a prompt of `texts[0]` random tokens, a picture, `texts[1]` tokens, a picture, ..."""
    generator = np.random.default_rng(seed)
    side, tokens = config.vision_config.image_size, config.mm_tokens_per_image
    soft = config.image_token_index
    picture = [config.boi_token_index, *[soft] * tokens, config.eoi_token_index]
    ids: list[int] = []
    items = []
    for number, length in enumerate(texts):
        if number:
            pixels = generator.normal(size=(1, 3, side, side)).astype(np.float32)
            place = PlaceholderRange(offset=len(ids) + 1, length=tokens)
            items.append(PromptItem(place, {"pixel_values": pixels}))
            ids += picture
        ids += generator.integers(5, 250, length).tolist()
    return Sample(token_ids=np.array(ids, np.int32), items=items)


def torch_inputs(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it."""
    ids = torch.tensor(sample.token_ids, dtype=torch.long)[None]
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.tensor(sample.is_embed, dtype=torch.long)[None],
    }
    names = sample.items[0].tensors if sample.items else ()
    return inputs | {
        name: torch.tensor(np.concatenate([item.tensors[name] for item in sample.items]))
        for name in names
    }
