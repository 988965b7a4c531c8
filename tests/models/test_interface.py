"""What a model's class may say, and return, in the ways of vLLM's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax.config.engine_config import MultiModalConfig
from mmjax.engine.core import EngineCore
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.models.interface import SupportsMultiModal, build_model, join_embeds, left_out_names
from tests.engine.tiny import answer, engine_config, message, tiny_params

NO_IMAGES = MultiModalConfig(limit_mm_per_prompt={"image": 0})
NO_MEDIA = MultiModalConfig(limit_mm_per_prompt={"image": 0, "audio": 0})


class Decoder(nnx.Module):
    def __init__(self) -> None:
        self.embed = Embed(7, 4, dtype=jnp.dtype(jnp.float32))

    def embed_input_ids(self, token_ids: Any) -> Any:
        return self.embed(token_ids)


class Marked(nnx.Module, SupportsMultiModal):
    """Two towers, and a decoder with a head."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        with self._mark_tower_model(hf_config, {"image", "video"}):
            self.num_patches = 3
            self.tower = Linear(4, 4, use_bias=True, dtype=dtype)
            self.projector = nnx.Param(jnp.zeros((4, 4), dtype))
        with self._mark_tower_model(hf_config, "audio"):
            self.ears = nnx.List([Linear(4, 4, use_bias=True, dtype=dtype)])
        with self._mark_language_model(hf_config):
            self.lm_head = Linear(4, 7, use_bias=True, dtype=dtype)
            self.language_model = Decoder()
        self.extra = Linear(4, 4, use_bias=True, dtype=dtype)


class Named(nnx.Module):
    """The same without the base: its attributes are named."""

    modalities = ("image", "audio", "video")
    tower_names = ("tower",)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.tower = Linear(4, 4, use_bias=True, dtype=dtype)
        self.language_model = Decoder()


class Silent(nnx.Module):
    """It says nothing of towers, and keeps all."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.language_model = Decoder()


def build(model_class: type, mm: MultiModalConfig) -> tuple[Any, set[str]]:
    graphdef, abstract = build_abstract(
        build_model, model_class, None, mm, dtype=jnp.dtype(jnp.float32)
    )
    names = {name.partition(".")[0] for name in flatten_params(abstract)}
    return bind(graphdef, abstract), names


class TestMarks:
    def test_they_name_the_modules_that_were_set(self):
        model, names = build(Marked, NO_IMAGES)
        assert model.modalities == ("image", "video", "audio")
        assert model.tower_names == ("tower", "projector", "ears")
        assert names == {"tower", "projector", "ears", "lm_head", "language_model", "extra"}
        assert left_out_names(model, NO_IMAGES) == ()

    def test_without_media_the_towers_are_left_out(self):
        none = MultiModalConfig(limit_mm_per_prompt=dict.fromkeys(("image", "audio", "video"), 0))
        model, names = build(Marked, none)
        assert names == {"lm_head", "language_model", "extra"}
        assert left_out_names(model, none) == ("tower", "projector", "ears")
        assert model.tower is None
        assert model.num_patches == 3
        named, names = build(Named, none)
        assert names == {"language_model"}
        assert left_out_names(named, none) == ("tower",)

    @pytest.mark.parametrize("model_class", [Marked, Named])
    def test_one_modality_that_is_allowed_keeps_them(self, model_class: type):
        model, names = build(model_class, NO_MEDIA)
        assert "tower" in names
        assert left_out_names(model, NO_MEDIA) == ()

    def test_a_class_that_says_nothing_keeps_all(self):
        model, names = build(Silent, NO_MEDIA)
        assert names == {"language_model"}
        assert left_out_names(model, NO_MEDIA) == ()

    def test_gemma3s_are_marked(self):
        graphdef, params = tiny_params()
        model = bind(graphdef, params)
        assert model.modalities == ("image",)
        assert model.tower_names == ("vision_tower", "multi_modal_projector")
        assert model.get_language_model() is model.language_model

    def test_the_language_model_is_the_one_that_embeds(self):
        graphdef, abstract = build_abstract(Marked, None, dtype=jnp.dtype(jnp.float32))

        def embed(params: Any) -> Any:
            return bind(graphdef, params).embed_input_ids(jnp.zeros(3, jnp.int32))

        assert jax.eval_shape(embed, abstract).shape == (3, 4)

        class Unmarked(nnx.Module, SupportsMultiModal):
            pass

        words = r"`Unmarked` has no `language_model`.*override"
        with pytest.raises(NotImplementedError, match=words):
            Unmarked().get_language_model()


class Listed(Gemma3ForConditionalGeneration):
    """One array for each picture or crop."""

    def embed_multimodal(self, pixel_values: Any) -> Any:
        return list(super().embed_multimodal(pixel_values))


class Paired(Gemma3ForConditionalGeneration):
    """A tuple of two arrays, which cut the call elsewhere than between units."""

    def embed_multimodal(self, pixel_values: Any) -> Any:
        rows = super().embed_multimodal(pixel_values)
        rows = rows.reshape(-1, rows.shape[-1])
        return rows[:3], rows[3:]


class Short(Gemma3ForConditionalGeneration):
    """A unit too few."""

    def embed_multimodal(self, pixel_values: Any) -> Any:
        return super().embed_multimodal(pixel_values)[:, 1:]


class TestEmbeddings:
    @pytest.mark.parametrize("model_class", [Listed, Paired])
    def test_a_list_of_arrays_is_answered_as_one_array(self, model_class: type):
        request = message("a", [[2, 3], (1, 1), [4, 5], (2, 2), [6]])
        expected = answer(core_of(Gemma3ForConditionalGeneration), request)
        assert answer(core_of(model_class), request) == expected

    def test_rows_that_are_missing_are_named(self):
        with pytest.raises(ValueError, match=r"`Short\.embed_multimodal` gives \d+ rows of width"):
            core_of(Short, precompile="smallest")

    def test_parts_are_joined_in_order(self):
        rows = jnp.arange(24.0).reshape(6, 4)
        assert join_embeds(rows) is rows
        joined = join_embeds((rows[:1], rows[1:5].reshape(2, 2, 4), rows[5:]))
        assert np.array_equal(joined, rows)

    @pytest.mark.parametrize(
        "wrong", [*(pytest.param(one, marks=pytest.mark.slow) for one in (None, "rows")), [None]]
    )
    def test_anything_else_is_refused(self, wrong: Any):
        class Wrong(Gemma3ForConditionalGeneration):
            def embed_multimodal(self, pixel_values: Any) -> Any:
                return wrong

        with pytest.raises(TypeError, match="embed_multimodal"):
            core_of(Wrong, precompile="smallest")


def core_of(model_class: type, **settings: Any) -> EngineCore:
    return EngineCore(engine_config(**settings), model_class=model_class, params=tiny_params()[1])
