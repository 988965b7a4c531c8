"""`LLM(devices=...)`: an engine on some of a process's devices, as beside a trainer."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from mmjax import LLM, SamplingParams
from mmjax.errors import ConfigError
from mmjax.weights.sharding import Device
from tests.kit import IMAGE_START, draw

PROMPTS: list[Any] = [
    {"prompt": f"{IMAGE_START} red", "multi_modal_data": {"image": draw(40, 30, 1)}},
    "a red circle",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=5),
    SamplingParams(temperature=1.0, seed=3, max_tokens=5, logprobs=2),
]


def answer(checkpoint: Path, **options: Any) -> tuple[list[list[int]], set[Device]]:
    """Return the tokens of some answers, and the devices that anything of the engine lies on."""
    before = jax.live_arrays()
    known = set(map(id, before))
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "use_tqdm_on_load": False}
    with LLM(str(checkpoint), max_num_batched_tokens=64, **settings, **options) as llm:
        outputs = [
            one for params in PARAMS for one in llm.generate(PROMPTS, params, use_tqdm=False)
        ]
        made = [array for array in jax.live_arrays() if id(array) not in known]
        devices = {device for array in made for device in array.devices()}
        assert llm.engine.compilations == 0
    return [list(output.outputs[0].token_ids) for output in outputs], devices


@pytest.fixture(scope="module")
def expected(tiny_gemma3: Path) -> list[list[int]]:
    tokens, devices = answer(tiny_gemma3)
    assert devices == {jax.local_devices()[0]}
    return tokens


def test_one_device_that_is_not_the_first(tiny_gemma3: Path, expected: list[list[int]]) -> None:
    device = jax.local_devices()[2]
    assert answer(tiny_gemma3, devices=[device]) == (expected, {device})


@pytest.mark.slow  # 25 s; engines over devices are in `tests/engine/test_parallel.py`
def test_the_devices_of_a_mesh(tiny_gemma3: Path, expected: list[list[int]]) -> None:
    mesh = Mesh(np.array(jax.local_devices()[1:3]).reshape(2, 1), ("fsdp", "tp"))
    assert answer(tiny_gemma3, mesh=mesh) == (expected, set(mesh.devices.flat))


def test_wrong_devices_are_refused(tiny_gemma3: Path) -> None:
    first, second = jax.local_devices()[:2]
    mesh = Mesh(np.array([first]), ("tp",))
    for options, says in (
        ({"devices": []}, "give some of"),
        ({"devices": [0]}, "give some of"),
        ({"devices": [first, first]}, "give each device once"),
        ({"devices": [first, second], "tensor_parallel_size": 1}, "2 devices are given"),
        ({"devices": [first], "mesh": mesh}, "give one of them"),
        ({"devices": jax.local_devices()[:3]}, "attention heads"),
    ):
        with pytest.raises(ConfigError, match=says):
            LLM(str(tiny_gemma3), **options)
