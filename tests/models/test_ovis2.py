"""Ovis2 beyond the laws: files that contradict each other, marks that only a picture may write."""

from pathlib import Path
from typing import Any

import pytest

from mmjax.errors import CheckpointError, RequestError
from mmjax.models.ovis2.host_inputs import MARKS
from tests.families import FAMILIES
from tests.families.directories import edit_json, golden_processor
from tests.families.ovis2 import write_files


@pytest.mark.parametrize(
    ("file", "edit", "match"),
    [
        ("processor_config.json", {"image_seq_length": 9}, "`image_seq_length` .* is 9, .* has 4"),
        ("processor_config.json", {"image_seq_length": None}, "`image_seq_length` .* is 256, "),
        ("preprocessor_config.json", {"size": {"height": 28, "width": 28}}, "`size` .*28.*, but"),
        ("config.json", {"image_token_id": 7}, "but `image_token_id` of config.json is 7"),
        ("config.json", {"visual_indicator_token_ids": [1, 2, 3, 4, 5]}, r"is \[1, 2, 3, 4, 5\]"),
    ],
)
def test_files_that_contradict_each_other_are_refused(
    tmp_path: Path, file: str, edit: dict[str, Any], match: str
):
    path = write_files(tmp_path)
    edit_json(path / file, edit)
    with pytest.raises(CheckpointError, match=match):
        golden_processor("ovis2", path=path).info.get_hf_processor()


@pytest.mark.parametrize("token", ["<IMG_ATOM>", *MARKS])
def test_a_prompt_writes_no_marks_of_its_own(token: str):
    """HF's class gives such a token the visual table's embedding where a picture is there too."""
    processor = FAMILIES["ovis2"].make_processor()
    with pytest.raises(RequestError, match=token):
        processor.apply(f"what {token} is it")
