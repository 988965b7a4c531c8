"""Which tokens may come next in a transcript, against transformers' logits processors."""

import random
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import WhisperTimeStampLogitsProcessor

from mmjax.engine.device.sampler import _prefer_timestamps
from mmjax.engine.scheduling.logit_rules import Transcript, pack_token_ids
from mmjax.errors import RequestError
from mmjax.params.sampling_params import (
    SamplingParams,
    StructuredOutputsParams,
    TranscriptRules,
)

VOCAB, EOS, FIRST = 70, 30, 40
RULES: dict[str, Any] = {"eos_token_id": EOS, "timestamps_from": FIRST}


def make_reference(*, max_initial: int | None, prefers: bool) -> Any:
    config: Any = SimpleNamespace(
        no_timestamps_token_id=FIRST - 1,
        eos_token_id=EOS,
        bos_token_id=EOS,
        max_initial_timestamp_index=max_initial,
    )
    return WhisperTimeStampLogitsProcessor(
        config,
        begin_index=1,
        _detect_timestamp_from_logprob=prefers,
    )


def unpack(bits: np.ndarray) -> np.ndarray:
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)


@pytest.mark.parametrize("max_initial", [None, 0, 12])
def test_what_may_come_is_what_transformers_leaves(max_initial: int | None):
    reference = make_reference(max_initial=max_initial, prefers=False)
    last = None if max_initial is None else FIRST + max_initial
    for seed in range(60):
        generator = random.Random(seed)
        rules = TranscriptRules(**RULES, last_first_timestamp=last)
        transcript, output = Transcript(rules, VOCAB), list[int]()
        for _ in range(14):
            left = reference(torch.tensor([[7, *output]]), torch.zeros(1, VOCAB))[0]
            allowed = unpack(transcript.allowed_bits)
            np.testing.assert_array_equal(allowed, np.isfinite(left.numpy()), str(output))
            resumed = Transcript(rules, VOCAB, output_token_ids=output)
            np.testing.assert_array_equal(resumed.allowed_bits, transcript.allowed_bits)
            choices = np.flatnonzero(allowed)
            times = choices[choices >= FIRST]
            wanted = times[:6] if len(times) and generator.random() < 0.5 else choices
            output.append(int(generator.choice(list(wanted))))
            transcript.advance(output[-1])


def test_suppressed_tokens():
    rules = TranscriptRules(
        eos_token_id=EOS, suppressed_token_ids=[3, 4], first_suppressed_token_ids=[5, EOS]
    )
    transcript = Transcript(rules, VOCAB, allowed_token_ids=[*range(20), EOS])
    first = {*range(20)} - {3, 4, 5}
    assert set(np.flatnonzero(unpack(transcript.allowed_bits))) == first
    transcript.advance(7)
    assert set(np.flatnonzero(unpack(transcript.allowed_bits))) == first | {5, EOS}
    assert transcript.has_next
    assert transcript.is_ready_by(0.0)
    assert transcript.error is None
    everything = Transcript(TranscriptRules(), VOCAB).allowed_bits
    np.testing.assert_array_equal(everything, pack_token_ids(range(VOCAB), VOCAB))


def test_timestamps_that_are_probable_together_leave_no_others():
    reference = make_reference(max_initial=None, prefers=True)
    generator = np.random.default_rng(0)
    output = [FIRST, 9]
    transcript = Transcript(TranscriptRules(**RULES), VOCAB, output_token_ids=output)
    allowed = unpack(transcript.allowed_bits)
    logits = generator.normal(scale=2.0, size=(40, VOCAB)).astype(np.float32)
    expected = reference(torch.tensor([[7, *output]] * 40), torch.tensor(logits)).numpy()
    masked = jnp.where(jnp.array(allowed)[None, :], jnp.array(logits), -jnp.inf)
    rows = jnp.array([FIRST] * 40, jnp.int32)
    np.testing.assert_array_equal(_prefer_timestamps(masked, rows), expected)
    has_text = np.isfinite(expected[:, :FIRST]).any(1)
    assert 0 < has_text.sum() < 40
    untouched = _prefer_timestamps(masked, jnp.zeros(40, jnp.int32))
    np.testing.assert_array_equal(untouched, masked)


def test_a_transcript_is_no_grammar():
    with pytest.raises(RequestError, match="`structured_outputs` both say"):
        SamplingParams(
            transcript=TranscriptRules(), structured_outputs=StructuredOutputsParams(regex="a")
        )
    wrong: Any = {"eos_token_id": 1}
    with pytest.raises(RequestError, match="give an instance of TranscriptRules"):
        SamplingParams(transcript=wrong)
    assert not SamplingParams(temperature=0.0, transcript=TranscriptRules()).is_plain
