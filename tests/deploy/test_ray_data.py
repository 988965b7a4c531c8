"""Rows of a dataset as Ray Data hands them to an actor: columns of arrays, there and back."""

from pathlib import Path
from typing import Any

import numpy as np

from mmjax.deploy.ray_data import AnswerRows
from tests.kit import draw


def test_rows_get_answers_and_a_wrong_one_stops_no_other(tiny_gemma3: Path) -> None:
    answer = AnswerRows(
        tiny_gemma3,
        image_column="picture",
        sampling_params={"temperature": 0.0, "max_tokens": 3},
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        use_tqdm_on_load=False,
    )
    pictures = [np.asarray(draw(40, 30, seed)) for seed in range(3)]
    batch: dict[str, Any] = {
        "prompt": np.array(["what is this?"] * 3, dtype=object),
        "picture": np.stack(pictures),
        "key": np.arange(3),
    }
    rows = answer(batch)
    assert rows.keys() == {*batch, "answer", "error"}
    assert list(rows["error"]) == [None] * 3
    assert all(isinstance(text, str) for text in rows["answer"])
    assert rows["key"] is batch["key"]
    mixed = np.array([pictures[0], b"no picture", None], dtype=object)
    again = answer({**batch, "picture": mixed})
    assert again["answer"][0] == rows["answer"][0]
    assert again["answer"][1] is None
    assert again["error"][1]
    assert again["error"][2] is None
    assert len(answer({name: column[:0] for name, column in batch.items()})["answer"]) == 0
