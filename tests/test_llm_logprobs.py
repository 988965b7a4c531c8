"""`LLM` with `logprobs_mode`: log-probabilities of the model, or of what is sampled from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax import LLM, SamplingParams
from mmjax.config.engine_config import LogprobsMode

PROMPTS = ["a red circle", "a star"]


def ask(
    checkpoint: Path, mode: LogprobsMode, params: list[SamplingParams]
) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Return each answer's tokens, and the log-probabilities at its places."""
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "logprobs_mode": mode}
    # All programs that a start compiles are few, of which none are for pictures.
    settings |= {"max_num_batched_tokens": 16, "limit_mm_per_prompt": {"image": 0}}
    settings |= {"use_tqdm_on_load": False}
    settings |= {"precompile": "all" if mode == "processed_logprobs" else "none"}
    with LLM(str(checkpoint), **settings) as llm:
        answers = []
        for one in params:
            for output in llm.generate(PROMPTS, one, use_tqdm=False):
                (answer,) = output.outputs
                assert answer.logprobs is not None
                shown = [{i: one.logprob for i, one in at.items()} for at in answer.logprobs]
                answers.append((answer.token_ids, shown))
        assert llm.engine.compilations == 0
        return answers


# The sampler's own are in tests/engine/test_sampler.py, and a server's in tests/test_serve.py.
@pytest.mark.slow
def test_processed_logprobs_are_those_of_the_draw(tiny_gemma3: Path) -> None:
    filtered = {"temperature": 0.7, "top_k": 6, "seed": 5}
    some = [
        SamplingParams(max_tokens=5, ignore_eos=True, logprobs=20, **filtered),
        SamplingParams(max_tokens=5, ignore_eos=True, logprobs=20, temperature=0.0),
    ]
    raw = ask(tiny_gemma3, "raw_logprobs", some)
    processed = ask(tiny_gemma3, "processed_logprobs", some)
    assert [token_ids for token_ids, _ in raw] == [token_ids for token_ids, _ in processed]
    for place, ((token_ids, model_s), (_, drawn)) in enumerate(zip(raw, processed, strict=True)):
        for token_id, own, found in zip(token_ids, model_s, drawn, strict=True):
            assert next(iter(found)) == token_id
            if place >= len(PROMPTS):
                assert found == pytest.approx(own, abs=1e-6), "greedy: nothing is edited"
                continue
            best = sorted(own, key=lambda one: -own[one])[:6]
            scaled = np.array([own[one] for one in best]) / 0.7
            expected = scaled - np.log(np.exp(scaled).sum())
            left = {one: value for one, value in found.items() if value > -np.inf}
            assert left == pytest.approx(dict(zip(best, expected, strict=True)), abs=1e-5)


def test_a_wrong_mode_is_refused(tiny_gemma3: Path) -> None:
    with pytest.raises(ValueError, match="logprobs_mode"):
        LLM(str(tiny_gemma3), logprobs_mode="logits")
