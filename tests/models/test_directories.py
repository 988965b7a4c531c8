"""Every family from a directory: the parity command, and four devices that decode as one."""

from pathlib import Path
from typing import Any

import pytest

from mmjax import LLM, SamplingParams
from mmjax.models.registry import MODELS
from mmjax.parity.__main__ import main
from tests.kit import draw
from tests.models.directories import (
    DIRECTORIES,
    choose_question,
    save_weights,
    small_settings,
    takes_one_image,
)
from tests.models.families.florence2 import fill as fill_florence2

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
WITHOUT_REFERENCE = {
    "DeepseekVLV2ForCausalLM",
    "InternVLChatModel",
    "MolmoForCausalLM",
    "QWenLMHeadModel",
}
"""Transformers has no class: other tests compare with HF's layout, or with golden answers."""
TAKES_TEXT_BY_DEFAULT = {"Florence2ForConditionalGeneration", "FuyuForCausalLM"}
"""Of the models of one image; HF's BLIP-2 needs one."""
PROBED = {
    "Blip2ForConditionalGeneration": ("qformer.encoder.layer.1", "language_projection"),
    "InternVLForConditionalGeneration": (
        "vision_tower.encoder.layers.1",
        "multi_modal_projector",
    ),
    "Qwen2_5_VLForConditionalGeneration": ("visual.blocks.1",),
}
"""Modules of towers and connectors that are compared too."""
IN_DEFAULT_RUN = {"Qwen2_5_VLForConditionalGeneration"}
"""The laws of arrays run for every family in any case, and `test_schedules.py` an engine."""
CASES = [
    pytest.param(name, marks=() if name in IN_DEFAULT_RUN else pytest.mark.slow)
    for name in DIRECTORIES
]


@pytest.fixture(params=CASES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    return request.param, DIRECTORIES[request.param](tmp_path)


def test_every_row_of_the_registry_has_a_directory():
    assert {name.partition(",")[0] for name in DIRECTORIES} == MODELS.keys()


def test_the_parity_command_finds_no_difference(
    directory: tuple[str, Path], capsys: pytest.CaptureFixture[str]
):
    name, path = directory
    # Without a number of images: up to three, of what both models take.
    most, number = (1, []) if takes_one_image(name) else (2, ["--num-images", "2"])
    arguments = ["--prompts", choose_question(name), *number, "--max-len", "640"]
    if name.startswith("Florence2"):
        # The directory's weights make answers differ, and rounding grow: torch's own float32 is
        # 2e-4 to 1e-3 from its float64.
        save_weights(path, fill_florence2)
        arguments[-1] = "64"
    code = main([str(path), *arguments, "--max-tokens", "4"])
    said = capsys.readouterr()
    if name in WITHOUT_REFERENCE:
        assert code == 2
        assert f"transformers has none for `{name}`" in said.err
        return
    assert code == 0, said.out
    assert f"{choose_question(name)!r} + {most}" in said.out
    assert f"+ {most + 1}" not in said.out
    assert (f"{choose_question(name)!r} + 0" in said.out) == (name in TAKES_TEXT_BY_DEFAULT)
    for probed in PROBED.get(name, ()):
        assert probed in said.out
    assert "parity: yes" in said.out


@pytest.mark.parametrize("name", CASES)
def test_four_devices_decode_as_one(name: str, tmp_path: Path):
    path = DIRECTORIES[name](tmp_path)
    settings = small_settings(name)
    answers = []
    for size in (1, 4):
        with LLM(path, tensor_parallel_size=size, use_tqdm_on_load=False, **settings) as llm:
            messages: list[Any] = [ask(name, seed) for seed in range(3)]
            outputs = llm.chat(messages, GREEDY, use_tqdm=False)
            assert llm.engine.compilations == 0
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    assert answers[0] == answers[1]
    assert len({str(answer) for answer in answers[0]}) > 1, "images change nothing"


def ask(name: str, seed: int) -> Any:
    image = {"type": "image_pil", "image_pil": draw(40 + 30 * seed, 50, seed)}
    return [{"role": "user", "content": [image, {"type": "text", "text": choose_question(name)}]}]
