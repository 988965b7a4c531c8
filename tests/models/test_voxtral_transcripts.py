"""A Voxtral's transcript is what HF's model says to the prompt of a request of a transcript."""

import numpy as np
import pytest
import torch

from mmjax import LLM
from mmjax.params.sampling_params import SamplingParams
from mmjax.parity.reference import generate_reference, load_reference
from tests.families.voxtral import VOXTRAL
from tests.models.test_clip_laws import draw_clip
from tests.processing.test_voxtral import CASES

NUM_TOKENS = 24


def test_a_clip_of_several_units():
    (case,) = (one for one in CASES if one.get("language") == "fr")
    clip = draw_clip(0, case["transcription"])
    reference = load_reference(VOXTRAL.checkpoint, VOXTRAL.architecture)
    features = VOXTRAL.call_hf(VOXTRAL.placeholder, [clip], {}).tensors
    ids = torch.tensor(case["ids"])[None]
    inputs = {**features, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = generate_reference(reference, inputs, NUM_TOKENS)
    own = {**VOXTRAL.llm_settings, "max_model_len": len(case["ids"]) + NUM_TOKENS}
    with LLM(VOXTRAL.checkpoint, use_tqdm_on_load=False, **own) as llm:
        # Its length ends it.
        params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
        transcript = llm.transcribe(clip, language="fr", sampling_params=params)
    (segment,) = transcript.segments
    assert list(segment.token_ids) == list(expected)
    assert (segment.start, segment.end) == (0.0, pytest.approx(len(clip) / 16_000))
    assert segment.avg_logprob is not None
    assert np.isfinite(segment.avg_logprob)
    assert transcript.language == "fr"
    assert "[" not in transcript.text
