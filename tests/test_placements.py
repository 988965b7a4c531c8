"""Wherever processed items are kept, the answers are the same."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmjax import LLM, SamplingParams
from mmjax.config.multimodal_config import ProcessorCacheType
from tests.kit import IMAGE_START

# By default `test_llm.py` asks for the same of an LRU that evicts and of shared memory, and
# tests/frontend/test_drift.py of shared memory that evicts.
pytestmark = pytest.mark.slow

PICTURES = [Image.fromarray(np.full((20, 30, 3), 40 * i, np.uint8)) for i in range(4)]
ROUNDS = [[0], [0, 1], [1, 0, 1], [2, 3, 0], [0, 1, 2]]
"""Which pictures each prompt shows; most came before."""


def answers(
    checkpoint: Path, kind: ProcessorCacheType, size_gb: float
) -> tuple[list[list[int]], int]:
    """Return the tokens of each round's two sequences, and the hits of P0's cache."""
    with LLM(
        str(checkpoint),
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        mm_processor_cache_type=kind,
        mm_processor_cache_gb=size_gb,
        use_tqdm_on_load=False,
    ) as llm:
        found = []
        for pictures in ROUNDS:
            prompt = {
                "prompt": IMAGE_START * len(pictures) + " a red circle",
                "multi_modal_data": {"image": [PICTURES[i] for i in pictures]},
            }
            params = SamplingParams(temperature=0.7, seed=1, n=2, max_tokens=4)
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            found.extend(list(sequence.token_ids) for sequence in output.outputs)
        cache = llm._input_processor.cache
        return found, 0 if cache is None else cache.make_stats().hits


@pytest.fixture(scope="module")
def uncached(tiny_gemma3: Path) -> list[list[int]]:
    tokens, _ = answers(tiny_gemma3, "lru", 0.0)
    assert len({tuple(sequence) for sequence in tokens}) > 2
    return tokens


@pytest.mark.parametrize(
    ("kind", "size_gb"),
    [
        ("shm", 45_000 / 2**30),  # three pictures: one is evicted, and comes again
        ("lru", 40_000 / 2**30),
        ("lru", 0.1),
        ("shm", 0.1),
        ("processor_only", 0.1),
    ],
)
def test_a_cache_changes_no_answer(
    kind: ProcessorCacheType, size_gb: float, tiny_gemma3: Path, uncached: list[list[int]]
) -> None:
    tokens, num_hits = answers(tiny_gemma3, kind, size_gb)
    assert tokens == uncached
    assert num_hits > 0
