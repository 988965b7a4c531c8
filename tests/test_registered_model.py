"""A model that a user's own module registers: in one process, and in the two of a server."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mmjax import LLM, MULTIMODAL_REGISTRY, SamplingParams
from tests.kit import draw
from tests.test_serve import ROOT, SMALL, Served, message_about

MODEL = """
from mmjax import MULTIMODAL_REGISTRY
from mmjax.models.family import FamilyDummyInputs
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.models.gemma3.processor import (
    Gemma3MultiModalProcessor,
    Gemma3ProcessingInfo,
)


@MULTIMODAL_REGISTRY.register_processor(
    Gemma3MultiModalProcessor, info=Gemma3ProcessingInfo, dummy_inputs=FamilyDummyInputs
)
class SeasideForConditionalGeneration(Gemma3ForConditionalGeneration):
    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality.startswith("image"):
            return "<start_of_image>"
        raise ValueError("Only image modality is supported")
"""
SERVE = """
import sys

if __name__ == "__main__":
    # Registered in this process alone: the engine's runs none of this.
    import seaside.model
    from mmjax.serve import main

    sys.exit(main())
"""
ARCHITECTURE = "SeasideForConditionalGeneration"
SETTINGS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a package that mmjax knows nothing of."""
    folder = tmp_path / "seaside"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "model.py").write_text(MODEL)
    (folder / "serve.py").write_text(SERVE)
    (folder / "script.py").write_text(f"{MODEL}\n{SERVE.replace('import seaside.model', '')}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


@pytest.fixture(scope="module")
def checkpoint(tiny_gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint under the name of another architecture."""
    path = tmp_path_factory.mktemp("seaside") / "model"
    shutil.copytree(tiny_gemma3, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [ARCHITECTURE]}))
    return path


def test_it_is_answered_alike_by_one_process_and_by_two(
    package: Path, checkpoint: Path, tiny_gemma3: Path, monkeypatch: pytest.MonkeyPatch
):
    message = message_about(draw(30, 20), "What color?")
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(tiny_gemma3, use_tqdm_on_load=False, **SETTINGS) as llm:
        expected = llm.chat([message], params, use_tqdm=False)[0].outputs[0].text
    assert expected
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setattr(MULTIMODAL_REGISTRY, "_registered", {})
    try:
        __import__("seaside.model")
        with LLM(checkpoint, use_tqdm_on_load=False, **SETTINGS) as llm:
            assert type(llm.engine).__name__ == "EngineCore"
            answer = llm.chat([message], params, use_tqdm=False)[0].outputs[0].text
    finally:
        for name in [name for name in sys.modules if name.startswith("seaside")]:
            del sys.modules[name]
    assert answer == expected
    server = Served(str(checkpoint), *SMALL, module="seaside.serve")
    try:
        url = server.wait_for(r"mmjax serving tiny at (\S+)\n").group(1)
        body = {"model": "tiny", "temperature": 0, "max_tokens": 8, "messages": [message]}
        done = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    finally:
        server.end()
    assert done.status_code == 200, done.text
    assert done.json()["choices"][0]["message"]["content"] == expected


@pytest.mark.usefixtures("package")
def test_a_class_of_the_started_script_is_refused_before_the_engine_loads(checkpoint: Path):
    done = subprocess.run(
        [sys.executable, "-m", "seaside.script", str(checkpoint), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert f"`__main__:{ARCHITECTURE}`, which the engine's process cannot import" in done.stderr
    assert "define the class at the top level of a module" in done.stderr
    assert "Traceback" not in done.stderr
    assert "loading weights" not in done.stderr
    assert "[P1 mmjax.engine.model]" not in done.stderr
