"""Rows of a dataset as Ray Data hands them to an actor: columns of arrays, there and back.

And through Ray Data itself: in the slow set, since Ray is not installed for the others.
"""

import io
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mmjax.deploy.ray_data import AnswerRows
from tests.kit import draw
from tests.test_examples import EXAMPLES, example_environment

NUM_FILES, ROWS_PER_FILE = 2, 256
WRONG_ROW = 100
GREEDY = {"temperature": 0.0, "max_tokens": 16}
"""As the example has them."""
QUESTIONS = ("What color is the circle?", "How many shapes are there?")


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
    assert list(rows["error"]) == [""] * 3
    assert all(isinstance(text, str) for text in rows["answer"])
    assert rows["key"] is batch["key"]
    mixed = np.array([pictures[0], b"no picture", None], dtype=object)
    again = answer({**batch, "picture": mixed})
    assert again["answer"][0] == rows["answer"][0]
    assert not again["answer"][1]
    assert again["error"][1]
    assert not again["error"][2]
    asked = np.array(["what is this?", None, b"what?"], dtype=object)
    again = answer({**batch, "prompt": asked})
    assert again["answer"][0] == rows["answer"][0]
    assert "`prompt` of this row is of type `NoneType`; expected a text" in again["error"][1]
    assert "`bytes`" in again["error"][2]
    assert len(answer({name: column[:0] for name, column in batch.items()})["answer"]) == 0


def encode(seed: int) -> bytes:
    file = io.BytesIO()
    draw(64, 48, seed).save(file, format="png")
    return file.getvalue()


def make_rows() -> list[dict[str, Any]]:
    """Return rows of which one has no picture that can be read."""
    pictures = [encode(seed) for seed in range(16)]
    rows = [
        {"key": key, "picture": pictures[key % 16], "prompt": QUESTIONS[key % 3 == 0]}
        for key in range(NUM_FILES * ROWS_PER_FILE)
    ]
    rows[WRONG_ROW]["picture"] = b"no picture"
    return rows


def write_files(folder: Path, rows: list[dict[str, Any]]) -> None:
    from pyarrow import Table, parquet

    folder.mkdir()
    for start in range(0, len(rows), ROWS_PER_FILE):
        table = Table.from_pylist(rows[start : start + ROWS_PER_FILE])
        parquet.write_table(table, folder / f"{start}.parquet")


def read_files(folder: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    rows = parquet.read_table(folder).to_pylist()
    return sorted(rows, key=lambda row: row["key"])


def kill_an_actor(process: subprocess.Popen[bytes], answered: Path, num_written: int) -> None:
    """Kill one when so many files are written, and others are not."""
    while not answered.exists() or len(list(answered.iterdir())) < num_written:
        assert process.poll() is None, "it ended before an actor was killed"
        time.sleep(0.05)
    titles = ((one, " ".join(one.cmdline())) for one in psutil.Process(process.pid).children(True))
    next(one for one, title in titles if "AnswerRows" in title).kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_kills", [0, 2])
def test_ray_answers_each_row_once(tmp_path: Path, num_kills: int) -> None:
    """And as one engine does; those of killed actors too."""
    assert find_spec("ray"), "Ray is not installed: run `make test-slow`"
    rows, answered = make_rows(), tmp_path / "answered"
    write_files(tmp_path / "asked", rows)
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / "ray_data.py"), str(tmp_path / "asked"), str(answered)],
            env=example_environment() | {"PYTHONPATH": str(EXAMPLES.parent)},
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        for number in range(num_kills):
            kill_an_actor(process, answered, number + 1)
        process.wait(timeout=900)
    assert process.returncode == 0, (tmp_path / "log").read_text(encoding="utf-8")
    found = read_files(answered)
    assert [row["key"] for row in found] == [row["key"] for row in rows]
    assert "Failed to load image" in found[WRONG_ROW]["error"]
    right = [row for row in found if row["key"] != WRONG_ROW]
    assert {row["error"] for row in right} == {""}
    alone = AnswerRows(image_column="picture", sampling_params=dict(GREEDY), use_tqdm_on_load=False)
    asked = [row for row in rows if row["key"] != WRONG_ROW]
    answers = alone(
        {name: np.array([row[name] for row in asked], dtype=object) for name in asked[0]}
    )
    assert [row["answer"] for row in right] == list(answers["answer"])
