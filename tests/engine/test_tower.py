"""An operator who allows no media gets no tower: nothing of it is loaded, compiled or kept."""

from pathlib import Path
from typing import Any

import jax
import pytest

from mmjax import LLM, SamplingParams
from mmjax.config.engine_config import MultiModalConfig
from mmjax.convert import convert
from mmjax.errors import RequestError
from mmjax.models.model_source import load_model_config
from tests.engine.tiny import answer, engine_config, message, start_tiny
from tests.kit import draw

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64}
NONE = {"image": 0}


def open_llm(model: Path, **settings: Any) -> LLM:
    return LLM(model, use_tqdm_on_load=False, **SIZES, **settings)


def ask(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate("Say something.", params, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def with_tower(tiny_gemma3: Path) -> tuple[list[int], int]:
    with open_llm(tiny_gemma3) as llm:
        return ask(llm), llm.engine.num_programs


def test_text_is_served_without_the_tower(tiny_gemma3: Path, with_tower: tuple[list[int], int]):
    before = {id(array) for array in jax.live_arrays()}
    with open_llm(tiny_gemma3, limit_mm_per_prompt=NONE) as llm:
        token_ids, num_programs = with_tower
        assert ask(llm) == token_ids
        assert llm.engine.num_programs < num_programs
        shapes = {array.shape for array in jax.live_arrays() if id(array) not in before}
        # The tower's patch embedding is the only array of four axes that a checkpoint has.
        assert (32, 3, 14, 14) not in shapes
        assert llm.engine.compilations == 0


def test_pictures_are_refused_by_the_limits_name(tiny_gemma3: Path):
    picture = {
        "prompt": "<start_of_image> What is it?",
        "multi_modal_data": {"image": draw(60, 40)},
    }
    with open_llm(tiny_gemma3, limit_mm_per_prompt=NONE) as llm:
        with pytest.raises(RequestError, match=r"At most 0 image.*--limit-mm-per-prompt"):
            llm.generate(picture, use_tqdm=False)
        assert ask(llm)


def test_a_snapshot_is_read_without_the_tower(
    tiny_gemma3: Path, with_tower: tuple[list[int], int], tmp_path: Path
):
    convert(load_model_config(str(tiny_gemma3)), tmp_path / "snapshot", use_tqdm=False)
    with open_llm(tmp_path / "snapshot", limit_mm_per_prompt=NONE) as llm:
        assert ask(llm) == with_tower[0]


def test_an_engine_without_a_tower_refuses_what_p0_let_pass():
    config = engine_config().with_mm(MultiModalConfig(limit_mm_per_prompt=NONE))
    core = start_tiny(config)
    with pytest.raises(RequestError, match="embeddings"):
        core.add_request(message("a", [[2, 3], (1, 1), [4]]))
    assert len(answer(core, message("b", [[2, 3, 4]]))) == 8
