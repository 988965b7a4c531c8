"""The example of GRPO: what it rewards and gives the trainer, and (slow) that its reward rises."""

import importlib.util
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from mmjax import LLM, SamplingParams
from tests.test_examples import EXAMPLES, run, stdout_of

MAX_LINES = 160


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLES / "grpo_tiny_scenes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short_enough_to_read():
    text = (EXAMPLES / "grpo_tiny_scenes.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES


def test_a_program_checks_the_answer(example: Any):
    (scene,) = example.sample_scenes(1, random.Random(3))
    number = len(scene.things)
    assert example.reward(str(number), scene) == 1
    for wrong in (str(number + 1), f"{number} ", "none", "", f"{number}{number}"):
        assert example.reward(wrong, scene) == 0


def test_an_answer_is_as_good_as_it_is_better_than_the_others(example: Any):
    def answer(*logprobs: float) -> Any:
        ids = [7, 5][: len(logprobs)]
        places = [{one: SimpleNamespace(logprob=p)} for one, p in zip(ids, logprobs, strict=True)]
        return SimpleNamespace(token_ids=ids, logprobs=places)

    outputs = [
        SimpleNamespace(multi_modal_inputs="first", outputs=[answer(-1.0, -2.0), answer(-3.0)]),
        SimpleNamespace(multi_modal_inputs="second", outputs=[answer(-4.0), answer(-5.0)]),
    ]

    class Model:
        def make_batch(self, pairs: Any) -> Any:
            assert pairs == [
                ("first", [7, 5]),
                ("first", [7]),
                ("second", [7]),
                ("second", [7]),
            ]
            return SimpleNamespace(answer_ids=np.zeros((4, 3)))

    rewards = np.array([[1.0, 0.0], [1.0, 1.0]])
    _, sampled, advantages = example.make_batch(Model(), outputs, rewards)
    np.testing.assert_array_equal(sampled, [[-1, -2, 0], [-3, 0, 0], [-4, 0, 0], [-5, 0, 0]])
    np.testing.assert_allclose(advantages[:, 0], [1, -1, 0, 0], atol=1e-3)


@pytest.mark.usefixtures("default_checkpoint")
def test_a_step_makes_what_was_right_likelier(example: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(example, "NUM_PROMPTS", 2)
    monkeypatch.setattr(example, "NUM_ANSWERS", 4)
    # About half of what is drawn is so.
    monkeypatch.setattr(example, "reward", lambda answer, scene: float(answer == "none"))
    sizes: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 128}
    with LLM(use_tqdm_on_load=False, **sizes) as llm:
        before = llm.params["language_model"]["norm"]["weight"]
        with jax.numpy_dtype_promotion("standard"):  # as users have it: optax mixes dtypes
            (first,) = example.train(llm, 1, 0)
        assert 0 < first < 1, "all answers were alike, and taught nothing"
        assert llm.weights_version == 1
        assert not np.array_equal(llm.params["language_model"]["norm"]["weight"], before)


@pytest.mark.slow  # two minutes of training
@pytest.mark.usefixtures("default_checkpoint")
def test_its_reward_rises_and_what_it_saves_is_the_same(example: Any, tmp_path: Path):
    printed = run("grpo_tiny_scenes.py", "--steps", "12", "--out", str(tmp_path / "out"))
    before, after = map(
        float, re.findall(r"^(?:before|after): reward (.*)$", printed, re.MULTILINE)
    )
    assert before < 0.4
    assert after >= 0.85
    assert (tmp_path / "out" / "reward.svg").read_text().startswith("<svg")
    answers = re.findall(r"  answers: (.*)", printed)[1].split()
    scenes = example.sample_scenes(64, random.Random("unseen 0"))[:12]
    with LLM(tmp_path / "out", max_num_seqs=8, max_model_len=128, use_tqdm_on_load=False) as llm:
        outputs = llm.chat(
            [example.ask(scene) for scene in scenes],
            SamplingParams(temperature=0.0, max_tokens=8),
            use_tqdm=False,
        )
    assert [output.outputs[0].text for output in outputs] == answers


@pytest.mark.slow  # some steps of training
@pytest.mark.usefixtures("default_checkpoint")
def test_the_notebook_runs():
    import nbformat
    from nbclient import NotebookClient

    from tests.test_examples import example_environment

    notebook: Any = nbformat.read(EXAMPLES / "grpo_tiny_scenes.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=280, resources={"metadata": {"path": str(EXAMPLES.parent)}}
    )
    client.execute(env=example_environment())
    rewards = [float(one) for one in re.findall(r"reward (\d\.\d\d),", stdout_of(notebook))]
    assert len(rewards) == 8
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2
