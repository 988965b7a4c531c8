"""Aya Vision beyond the laws: what logits are scaled by, files that contradict each other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax.errors import CheckpointError
from mmjax.parity.__main__ import main
from mmjax.parity.reference import make_pixels
from mmjax.processing import BaseMultiModalProcessor
from tests.families import FAMILIES
from tests.families.aya_vision import write_cohere2_files, write_files
from tests.families.directories import edit_json, golden_processor
from tests.kit import draw


def test_parity_knows_that_hfs_class_leaves_out_what_logits_are_scaled_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Of the decoder alone HF multiplies: tests/language/test_decoders.py compares that."""
    family = FAMILIES["aya_vision"]
    path = family.write(tmp_path)
    edit_json(path / "config.json", {"text_config.logit_scale": 0.25})
    arguments = ["--prompts", "Which?", "--num-images", "1", "--max-tokens", "8"]
    assert main([str(path), *arguments, "--summary-only"]) == 1
    result, note = capsys.readouterr().out.splitlines()[-2:]
    assert result.startswith("parity: NO")
    assert note.startswith("note: config.json sets `logit_scale` to 0.25: mmjax obeys, HF's")


def make_edited(folder: Path, file: str, edit: dict[str, Any]) -> BaseMultiModalProcessor[Any]:
    path = write_files(folder)
    edit_json(path / file, edit)
    return golden_processor("aya_vision", path=path)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            {"patch_size": 16},
            "`patch_size` of preprocessor_config.json is 16, .* config.json gives 2",
        ),
        ({"size": {"height": 28, "width": 28}}, "takes .*56.*; make them equal"),
    ],
)
def test_command_a_visions_files_too(tmp_path: Path, edit: dict[str, Any], match: str):
    path = write_cohere2_files(tmp_path)
    edit_json(path / "preprocessor_config.json", edit)
    with pytest.raises(CheckpointError, match=match):
        golden_processor("cohere2_vision", path=path).info.get_hf_processor()


@pytest.mark.parametrize("edit", [{"do_rescale": False}, {"do_normalize": False}], ids=str)
def test_command_a_visions_pixels_are_as_its_files_say(tmp_path: Path, edit: dict[str, Any]):
    family, image = FAMILIES["cohere2_vision"], draw(56, 56)
    path = write_cohere2_files(tmp_path)
    edit_json(path / "preprocessor_config.json", edit)
    processor = golden_processor(family.name, path=path)
    inputs = processor.apply(family.placeholder, {"image": image})
    pixels = make_pixels(inputs.mm_kwargs.get_data())["pixel_values"]
    wanted = family.call_hf(family.placeholder, [image], edit).tensors["pixel_values"]
    # As large as 510 where they are not rescaled.
    np.testing.assert_allclose(pixels, wanted, rtol=1e-6, atol=1e-6)


def test_a_placeholder_of_several_tokens_is_replaced_in_the_text():
    """`<image>` is no token of the published tokenizer; words around it are as HF's."""
    family = FAMILIES["aya_vision"]
    tokenizer = family.make_processor().info.get_tokenizer()
    assert len(tokenizer.encode("<image>", add_special_tokens=False)) > 1
