"""A small model's states, bit for bit: whatever program computes a token, and beside whom.

Every row of every step is compared, over decoders with heads of many widths, for kernels are chosen
by them. `test_schedules.py` compares those of the plain tiny models.
"""

import pytest

from mmjax.layers.recurrent.chunks import CHUNK
from tests.engine.bench import Bench, check_states
from tests.families import TINY_FAMILIES, served_model
from tests.families.tiny import TinyModel

pytestmark = pytest.mark.as_served

WIDTHS = (32, 64, 128)


def check_one_state(model: TinyModel, num_schedules: int) -> None:
    bench = Bench(model, num_prompts=12)
    for seed in range(num_schedules):
        bench.run(seed, is_recording=True)
    programs = {
        bucket for found in bench.states.values() for some in found.values() for bucket in some
    }
    # Of seven: schedules of long prompts, as DeepSeek-OCR's, fill no mixed sizes between.
    assert len({(bucket.num_tokens, bucket.num_requests) for bucket in programs}) >= 4
    # Whisper's prompts are its decoder's, a few tokens each.
    check_states(bench, num_shared=100 if model.family.name == "whisper" else 150)


def with_heads(name: str, width: int) -> TinyModel:
    """Return a tiny model of two heads of a width, or of one where two would make it a large one.

    Large are weights of 2^17 numbers, of which decoding and prompts have an order of sums each
    (docs/determinism.md): inputs of recurrent layers are three times as wide as the model and more.
    """
    family = TINY_FAMILIES[name]
    # Gemma 4 has layers whose heads are twice as wide.
    is_wide = family.longest_run == CHUNK or name.startswith("gemma4")
    number = 1 if width == 128 and is_wide else 2
    settings = family.resize(number * width, width, number)
    if name == "glm4v_moe":
        # A sigmoid over two rows of six has other last bits than over more (docs/determinism.md).
        settings["text"]["n_routed_experts"] = 8
    return TinyModel(family, **settings)


# By default `test_schedules.py` compares every state of two families' tiny models, whose heads are
# narrow: those that XLA computes in most ways; `test_mixed_fields.py` compares Gemma 3's answers.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_token_has_one_state_with_heads_of_many_widths(width: int) -> None:
    check_one_state(with_heads("gemma3", width), 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [name for name in TINY_FAMILIES if name != "gemma3"])
def test_a_token_has_one_state_with_heads_of_many_widths_in_every_family(
    name: str, width: int, all_sizes: None
) -> None:
    if (name, width) == ("lfm3_vl", 128):
        pytest.skip("one head has one gate, and a product with one column adds in other orders")
    check_one_state(with_heads(name, width), 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_a_token_has_one_state_in_60_schedules(name: str) -> None:
    check_one_state(served_model(name), 60)
