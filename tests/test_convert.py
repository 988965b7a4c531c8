"""A checkpoint as a snapshot: the same answers from it, on one device and on four."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax import LLM, SamplingParams
from mmjax.convert import main
from mmjax.errors import SnapshotDamagedError
from tests.kit import draw, tiny_gemma3_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
NUM_DEVICES = 4

Answers = list[tuple[list[int], list[float]]]
"""Ids and log-probabilities of the sampled tokens."""


def ask(model: Path, **settings: Any) -> Answers:
    """Return ids and log-probabilities of two answers: to a text, and about a picture."""
    picture = {
        "prompt": "<start_of_image> What is it?",
        "multi_modal_data": {"image": draw(60, 40)},
    }
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 64}
    with LLM(model, use_tqdm_on_load=False, **sizes, **settings) as llm:
        outputs = llm.generate(["Say something.", picture], PARAMS, use_tqdm=False)
    answers = []
    for output in outputs:
        (answer,) = output.outputs
        assert answer.logprobs is not None
        logprobs = [next(iter(position.values())).logprob for position in answer.logprobs]
        answers.append((answer.token_ids, logprobs))
    return answers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return tiny_gemma3_checkpoint(tmp_path_factory.mktemp("checkpoint"), text=heads)


@pytest.fixture(scope="module")
def snapshot(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "snapshot"
    assert main([str(checkpoint), str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    return ask(checkpoint)


def test_it_gives_the_checkpoints_own_answers(alone: Answers, snapshot: Path):
    assert ask(snapshot) == alone


@pytest.mark.slow  # 14 s of compiling
def test_it_is_spread_over_four_devices(alone: Answers, snapshot: Path):
    together = ask(snapshot, tensor_parallel_size=NUM_DEVICES)
    for (ids, logprobs), (other_ids, other_logprobs) in zip(alone, together, strict=True):
        assert ids == other_ids
        np.testing.assert_allclose(logprobs, other_logprobs, atol=1e-4)


def test_of_a_damaged_one_the_checkpoint_is_loaded(
    alone: Answers,
    checkpoint: Path,
    snapshot: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    damaged = tmp_path / "damaged"
    shutil.copytree(snapshot, damaged)
    largest = max((damaged / "params").rglob("*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    # Not by the fixture, whose tests compile their engines' programs anew.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmjax.engine.model.logger.propagate", True)
        assert ask(damaged) == alone
    assert f"until then the weights of `{checkpoint}` are loaded" in caplog.text
    metadata = damaged / "mmjax_snapshot.json"
    gone = json.loads(metadata.read_text()) | {"source": str(tmp_path / "gone")}
    metadata.write_text(json.dumps(gone))
    with pytest.raises(SnapshotDamagedError, match="has other bytes than were written"):
        ask(damaged)


def test_it_holds_no_file_of_weights_twice(checkpoint: Path, snapshot: Path):
    beside = {file.name for file in checkpoint.iterdir()} - {"model.safetensors"}
    assert beside < {file.name for file in snapshot.iterdir()}
    assert not list(snapshot.glob("*.safetensors*"))


def test_the_arrays_have_the_dtype_that_is_asked_for(checkpoint: Path, tmp_path: Path):
    out = tmp_path / "half"
    assert main([str(checkpoint), str(out), "--dtype", "bfloat16"]) == 0
    assert json.loads((out / "mmjax_snapshot.json").read_text())["dtype"] == "bfloat16"


def test_a_directory_in_use_is_refused(
    checkpoint: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(checkpoint), str(snapshot)]) == 1
    assert "exists already; remove it" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_refused_before_weights_are_loaded(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("mmjax.convert.load_params", None)
    (tmp_path / "file").touch()
    assert main([str(checkpoint), str(tmp_path / "file" / "out")]) == 1
    assert "file/out` cannot be made (Not a directory)" in capsys.readouterr().err


def test_a_snapshot_of_a_snapshot_is_refused(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(snapshot), str(tmp_path / "again")]) == 1
    assert "is a snapshot already" in capsys.readouterr().err
