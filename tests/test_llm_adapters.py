"""`LLM` with adapters: one for all prompts, or one for each."""

from pathlib import Path
from typing import Any

import pytest

from mmjax import LLM, LoRARequest, SamplingParams
from mmjax.errors import CheckpointError, RequestValueError
from mmjax.llm.arguments import adapters_for
from tests.engine.adapters import make_tensors, write_adapter

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
LAYERS = {f"language_model.layers.{n}.self_attn.q_proj": (32, 32) for n in range(6)}


def make(path: Path, seed: int) -> LoRARequest:
    """Write a random adapter of the tiny checkpoint."""
    write_adapter(path, tensors=make_tensors(seed, layers=LAYERS), lora_alpha=40)
    return LoRARequest(path.name, seed, str(path))


def test_prompts_have_their_own_adapters(tiny_gemma3: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "enable_lora": True}
    poet, critic = make(tmp_path / "poet", 1), make(tmp_path / "critic", 2)
    with LLM(str(tiny_gemma3), max_loras=2, use_tqdm_on_load=False, **settings) as llm:

        def ask(lora_request: Any, prompts: Any = "a red circle") -> list[list[int]]:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora_request)
            return [output.outputs[0].token_ids for output in outputs]

        alone = [ask(one)[0] for one in (poet, critic, None)]
        assert len(set(map(tuple, alone))) == 3
        assert ask([poet, critic, None], ["a red circle"] * 3) == alone
        assert ask(poet, ["a red circle"] * 2) == [alone[0]] * 2
        other = LoRARequest("poet", 3, critic.lora_path)
        later = llm.generate(iter(["a red circle"]), GREEDY, use_tqdm=False, lora_request=poet)
        assert ask(other) == [alone[1]], "another adapter of the name"
        assert [output.outputs[0].token_ids for output in later] == [alone[0]]
        begun = llm.generate(iter(["a red circle"] * 6), GREEDY, lora_request=poet)
        answers = [next(iter(begun))]
        with pytest.raises(RuntimeError, match="answers another call"):
            ask(other)
        answers += begun
        assert [output.outputs[0].token_ids for output in answers] == [alone[0]] * 6
        with pytest.raises(RequestValueError, match="2 prompts and 1"):
            ask([poet], ["a", "b"])
        with pytest.raises(CheckpointError, match="does not exist"):
            ask(LoRARequest("lost", 4, str(tmp_path / "nowhere")))
        tensors = make_tensors(1, layers={"language_model.layers.9.self_attn.q_proj": (32, 32)})
        write_adapter(tmp_path / "bad", tensors=tensors)
        with pytest.raises(RequestValueError, match=r"layers\.9"):
            ask(LoRARequest("bad", 5, str(tmp_path / "bad")))
        assert ask([poet, None], ["a red circle"] * 2) == [alone[0], alone[2]]


def test_the_prompts_of_a_call_have_one_adapter_of_a_name() -> None:
    """Else the last one would answer all of them."""
    poet, other = LoRARequest("poet", 1, "a"), LoRARequest("poet", 2, "b")
    assert adapters_for([poet, None, LoRARequest("poet", 1, "a")], 3) == [poet, None, poet]
    with pytest.raises(RequestValueError, match="number 1 of 'a' and number 2 of 'b'") as caught:
        adapters_for([poet, None, other], 3)
    assert caught.value.param == "lora_request"


def test_a_request_needs_a_name_and_a_path() -> None:
    for name, path in (("", "x"), ("x", "")):
        with pytest.raises(RequestValueError, match="name and a path"):
            LoRARequest(name, 1, path)
