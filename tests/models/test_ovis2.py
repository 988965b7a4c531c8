"""Ovis2 beyond the laws: files that contradict each other, marks that only a picture may write."""

import pytest

from mmjax.errors import RequestError
from mmjax.models.ovis2.host_inputs import MARKS
from tests.families import FAMILIES


@pytest.mark.parametrize("token", ["<IMG_ATOM>", *MARKS])
def test_a_prompt_writes_no_marks_of_its_own(token: str):
    """HF's class gives such a token the visual table's embedding where a picture is there too."""
    processor = FAMILIES["ovis2"].make_processor()
    with pytest.raises(RequestError, match=token):
        processor.apply(f"what {token} is it")
