"""A field that stays on the host never reaches a device; what `encode` takes of others does."""

from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from mmjax.engine.core import EngineCore
from mmjax.models.registry import load_model_class
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import MultiModalKwargsItem
from tests.engine.tiny import answer, message, tiny_engine
from tests.families import FAMILIES
from tests.families.default_run import rows

ODD_SIZE = 1009
"""Elements of the field on the host: no other array has as many."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Collect what the host gives to the devices."""
    seen: list[np.ndarray] = []
    put = jax.device_put

    def record(x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(np.asarray(leaf) for leaf in jax.tree.leaves(x))
        return put(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", record)
    return seen


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return tiny_engine()


def test_a_field_of_the_host_stays_there(core: EngineCore, sent: list[np.ndarray]) -> None:
    request = message("a", [[2, 3], (1, 1), [4]], max_tokens=2)
    feature = request.mm_features[0]
    assert isinstance(feature.data, MultiModalKwargsItem)
    pixels = feature.data["pixel_values"].data
    on_host = MultiModalFieldElem(
        data=np.arange(ODD_SIZE), field=MultiModalBatchedField(keep_on_cpu=True)
    )
    feature.data = MultiModalKwargsItem({**feature.data, "sizes": on_host})
    assert len(answer(core, request)) == 2
    assert any(np.array_equal(array[: len(pixels)], pixels) for array in sent if array.ndim == 4)
    everything = [*(array.size for array in sent), *(array.size for array in jax.live_arrays())]
    assert ODD_SIZE not in everything


@pytest.mark.parametrize("name", rows("fields kept on the host", FAMILIES))
def test_what_a_tower_takes_is_not_kept_on_the_host(name: str) -> None:
    family = FAMILIES[name]
    processor = family.make_processor()
    inputs = processor.apply(family.placeholder, {"image": Image.new("RGB", (40, 40))})
    item = inputs.mm_kwargs["image"][0]
    assert item is not None
    kept = {key for key, elem in item.items() if elem.field.keep_on_cpu}
    model_class: Any = load_model_class(family.architecture)
    host_inputs = model_class.host_inputs(processor.info.get_hf_config())
    assert not kept & host_inputs.encoder_spec.inputs.keys()
