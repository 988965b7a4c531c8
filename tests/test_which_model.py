"""Each command of examples/README.md runs, on a tiny random checkpoint of the model's family."""

import importlib.util
import re
import shlex
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from mmjax import LLM
from mmjax.models.registry import MODELS
from tests.families import ALL_FAMILIES, FAMILIES

EXAMPLES = Path(__file__).parent.parent / "examples"
OTHERS = {"ibm-granite/granite-docling-258M": "Idefics3ForConditionalGeneration"}
"""Models of the page that no row of the registry has as its example."""
ARCHITECTURES = {row.example: name for name, row in MODELS.items()} | OTHERS
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[2:] for line in re.findall(r"^python examples/ask.*", README, re.M)]
RUN = {"PaddlePaddle/PaddleOCR-VL"}
"""In the fast run; the others are slow."""


def load_ask() -> Any:
    spec = importlib.util.spec_from_file_location("ask", EXAMPLES / "ask.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_family(model: str) -> Any:
    architecture = ARCHITECTURES[model]
    return next(one for one in ALL_FAMILIES.values() if one.architecture == architecture)


def cases() -> list[Any]:
    seen: set[str] = set()
    found = []
    for model, *given in COMMANDS:
        is_fast = model in RUN - seen
        seen.add(model)
        marks = () if is_fast else pytest.mark.slow
        found.append(pytest.param(model, given, id=f"{model} {given[-1]}", marks=marks))
    return found


@pytest.mark.parametrize(("model", "given"), cases())
def test_a_command_of_the_page_runs(
    model: str, given: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(EXAMPLES.parent)
    family = find_family(model)
    path = Path(copytree(family.checkpoint, tmp_path / "checkpoint"))
    (path / "chat_template.jinja").unlink(missing_ok=True)  # some golden ones know no videos
    settings = {**family.llm_settings, "max_num_seqs": 1, "max_num_batched_tokens": 256}
    words = [one for one in given if one != "--marks"]
    with LLM(path, use_tqdm_on_load=False, **settings) as llm:
        answer = load_ask().ask(llm, words, max_tokens=4, marks="--marks" in given)
    assert isinstance(answer, str)


TASKS = {
    "OCR:": "PaddlePaddle/PaddleOCR-VL",
    "Table Recognition:": "PaddlePaddle/PaddleOCR-VL",
    "Formula Recognition:": "zai-org/GLM-OCR",
    "<doclang>": "ibm-granite/granite-for-docling-500m",
    "OCR with format: ": "stepfun-ai/GOT-OCR-2.0-hf",
    "Parse this document to Markdown.": "baidu/Qianfan-OCR",
    "Parse the table in the image into HTML.": "tencent/HunyuanOCR",
    "QwenVL HTML": "Qwen/Qwen2.5-VL-3B-Instruct",
    "Outline the position of each shape and output all the coordinates in JSON format.": (
        "Qwen/Qwen2.5-VL-3B-Instruct"
    ),
    "<OD>": "florence-community/Florence-2-base-ft",
    "Point to the circles.": "allenai/Molmo2-4B",
}


@pytest.mark.parametrize("text", TASKS)
def test_a_text_of_the_page_is_one_of_the_models_tasks(text: str):
    model = TASKS[text]
    assert any(one[0] == model and text in one for one in COMMANDS)
    tasks = find_family(model).make_processor().info.get_tasks().values()
    patterns = ["".join(re.escape(x) if x[0] != "{" else ".+" for x in split(t)) for t in tasks]
    assert any(re.fullmatch(pattern, text) for pattern in patterns)


def split(task: str) -> list[str]:
    """Return a task's words, and what stands for the asker's own."""
    return [one for one in re.split(r"(\{[^}]*\})", task) if one]


def test_granite_docling_is_known_by_its_marks():
    info = FAMILIES["idefics3"].make_processor().info
    assert info.get_tasks() == {}, "SmolVLM is asked in words of one's own"
    tokenizer = info.get_tokenizer()
    tokenizer.add_tokens(["<doctag>"])
    command = next(one for one in COMMANDS if one[0] == "ibm-granite/granite-docling-258M")
    assert command[2] in info.get_tasks().values()
