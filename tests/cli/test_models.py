"""`mmjax models`: a list, and whether a checkpoint can be served here."""

import json
from pathlib import Path
from shutil import copytree

import jax
import pytest
from safetensors.numpy import load_file, save_file

from mmjax.cli import models
from mmjax.cli.main import main
from mmjax.cli.models import Machine
from mmjax.models.registry import MODELS


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["models", *argv])
    written = capsys.readouterr()
    return status, written.out, written.err


def test_each_class_is_listed_with_its_media_and_a_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run(capsys, "--json")
    rows = json.loads(out)
    assert status == 0
    assert [row["architecture"] for row in rows] == list(MODELS)
    assert all({"image", "audio"} & {*row["media"]} for row in rows)
    assert all(row["example"].count("/") == 1 for row in rows)
    hearing = {row["architecture"] for row in rows if {"image", "audio"} <= {*row["media"]}}
    assert hearing == {
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
    }
    _, text, _ = run(capsys)
    assert all(name in text and row.example in text for name, row in MODELS.items())


def test_what_a_directory_needs(tiny_gemma3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, str(tiny_gemma3), "--max-model-len", "128", "--json")
    found = json.loads(out)
    assert status == 0
    stored = load_file(tiny_gemma3 / "model.safetensors")
    assert sum(found["parts"].values()) == sum(array.size for array in stored.values())
    needs = found["needs"]
    assert needs["float32"]["weights"] == 4 * sum(found["parts"].values())
    assert needs["bfloat16"]["weights"] * 2 == needs["float32"]["weights"]
    assert needs["int8"]["weights"] < needs["bfloat16"]["weights"]
    assert needs["float32"]["kv_cache_request"] == 128 * needs["float32"]["kv_cache_token"]
    _, text, _ = run(capsys, str(tiny_gemma3))
    assert text.splitlines()[-1] == f"Serve it: mmjax serve {tiny_gemma3}"


@pytest.fixture(scope="module")
def need(tiny_gemma3: Path) -> int:
    """Return the bytes that the checkpoint needs in float32."""
    return models.examine(str(tiny_gemma3)).needs["float32"].total


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1.0, (0, "mmjax serve {model}")),
        (0.6, (0, "mmjax serve {model} --dtype bfloat16 --tensor-parallel-size 2")),
        (0.1, (1, "cannot hold it")),
    ],
)
def test_what_fits_the_machine_is_advised(
    tiny_gemma3: Path,
    need: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    expected: tuple[int, str],
) -> None:
    num_devices = 1 if share == 1.0 else 2
    machine = Machine("gpu", num_devices, total=4 * need, free=int(share * need))
    monkeypatch.setattr(models, "_find_machine", lambda: machine)
    status, out, _ = run(capsys, str(tiny_gemma3))
    expected_status, last_line = expected
    assert status == expected_status
    assert last_line.format(model=tiny_gemma3) in out.splitlines()[-1]


def test_why_a_directory_cannot_be_served(
    tiny_gemma3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str, **settings: object) -> str:
        path = copytree(tiny_gemma3, tmp_path / name)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **settings}))
        if not settings:
            stored = load_file(path / "model.safetensors")
            stored["odd.weight"] = stored.pop(next(iter(stored)))
            save_file(stored, path / "model.safetensors")
        status, _, err = run(capsys, str(path))
        assert status == 1
        assert err.startswith(f"{path} cannot be served: ")
        return err

    unknown = refuse("unknown", architectures=["Gemma33ForConditionalGeneration"])
    assert "`Gemma33ForConditionalGeneration` is not supported" in unknown
    assert "`Gemma3ForConditionalGeneration`" in unknown
    assert "`hqq`" in refuse("quantized", quantization_config={"quant_method": "hqq"})
    assert "1 missing, 1 unexpected" in refuse("renamed")


def test_a_hub_id_is_examined_without_its_weights(
    tiny_gemma3: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append((model, allow_patterns))
        return str(tiny_gemma3)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    status, out, _ = run(capsys, "someone/tiny")
    assert status == 0
    assert out.startswith("someone/tiny: Gemma3ForConditionalGeneration, takes image\n")
    ((model, patterns),) = asked
    assert model == "someone/tiny"
    assert "*.json" in patterns
    assert not any("safetensors" in pattern for pattern in patterns)


def test_this_machines_memory_is_that_of_its_devices() -> None:
    machine = models._find_machine()
    assert machine.platform == jax.local_devices()[0].platform
    assert 0 < machine.free <= machine.total
