"""Which rows of the table the default run asks, by law; the slow run (`make test-slow`) asks all.

A law that took a second of each of sixty families would take a minute of a core, and one that
compiles an engine for each ten: CI has two cores and 25 minutes for 13,000 tests. So each family
has by default what is cheapest of what finds a wrong answer of its own: ids, places and pixels
against HF's, and its states, logits and greedy tokens against HF's once (`HELD_ELSEWHERE` says
where, if not in `test_array_laws.py`). What an engine, a server or a format does with any family is
asked of a few whose mechanisms differ, which `ASKED` says by law.

A new family changes nothing here, and is in the default run by its first variant.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

NEAR = {
    "cohere2_vision": "aya_vision",
    "deepseek_ocr": "unlimited_ocr",
    "glm46v": "glm4v",
    "glm4v_moe": "glm4v",
    "granite4_vision": "llava",
    "internvl gpt_oss": "internvl",
    "lighton_ocr": "mistral3",
    "qianfan_ocr": "internvl",
    "minicpm_ocr": "minicpmv4_6",
    "minicpmv4_7": "minicpmv4_6",
    "llava siglip": "llava",
    "llava_next": "llava",
    "llava_onevision": "llava",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_omni": "qwen2_5_omni",
    "qwen3_vl_moe": "qwen3_vl",
    "smolvlm": "idefics3",
    "ultravox": "voxtral",
    "unlimited_ocr": "deepseek_ocr2",
}
"""Rows that are little but others of another row's parts: laws that take seconds a row ask them in
the slow run alone. `make test-slow` compares the arrays of all with HF's, and the default run those
of which a part is in no other row."""

LEAST_ALIKE = {
    "blip2",  # an item is inserted before the prompt
    "florence2",  # encoder and decoder
    "gemma4",  # layers that share a cache
    "internvl gpt_oss",  # sinks, experts
    "molmo2",  # rows of all items see each other
    "paligemma",  # the whole prompt sees itself
    "qwen2_5_vl",  # windows of a tower; rotary positions of three axes
    "qwen3_vl",  # features for the first decoder layers
}
"""What an engine does differently for one family and another: laws that compile an engine's
programs, or more, ask some of these in the default run, and all families in the slow one."""

VARIANTS = {
    "blip2": ("cross-attention in every block, a text branch, another decoder",),
    "chameleon": ("norms behind, shared key heads",),
    "florence2": ("wide images, deeper stages, scaled embeddings, a head of its own",),
    # Phi-3's and InternLM's fused layers are in `test_internvl_original.py`.
    "internvl": ("qwen3 with experts, one layer without", "first state, no squares"),
}
"""Whose arrays are compared with HF's by default beside the first, by family. What the others vary
is compared by parts, too, in `tests/towers` and `tests/language`."""

HELD_ELSEWHERE = {
    # A row of `test_array_laws.py` that has the same parts.
    "cohere2_vision": "aya_vision",
    "deepseek_ocr": "unlimited_ocr",
    "glm46v": "glm4v_moe",
    "glm4v": "glm4v_moe",
    "idefics3": "smolvlm",
    "lighton_ocr": "mistral3",
    "minicpm_ocr": "minicpmv4_7",
    "minicpmv4_6": "minicpmv4_7",
    "qianfan_ocr": "internvl",
    "qwen3_5": "qwen3_5_moe",
    "qwen3_vl_moe": "qwen3_vl",
    # A test that compares its logits or its greedy tokens with HF's, or with the authors' code's.
    "blip2_t5": "models.test_blip2_t5::test_answers_of_a_directory_are_hfs",
    "deepseek_ocr2": "models.test_deepseek_ocr2::"
    "test_a_tiny_checkpoint_in_deepseeks_layout_says_what_hf_says",
    "deepseek_vl2": "models.test_deepseek_vl2::"
    "test_embeddings_logits_and_answers_are_the_published_ones",
    "florence2": "models.test_florence2_llm::test_answers_of_a_directory_are_hfs",
    "gemma3": "parity.test_parity::test_the_engine_says_what_hf_says",
    "internvl original": "models.test_internvl_original::test_states_logits_and_tokens_are_hfs",
    "molmo": "models.test_molmo::test_embeddings_logits_and_tokens_are_the_published_ones",
    "paligemma": "models.test_hf_answers::test_the_engines_greedy_tokens_are_hfs[paligemma]",
    "pixtral": "models.test_pixtral_directory::test_pixtrals_answers_are_hfs",
    "qwen2_5_omni": "models.test_qwen2_5_omni::"
    "test_positions_logits_and_tokens_of_videos_with_sound_are_hfs",
    "qwen2_5_vl": "models.test_hf_answers::test_the_engines_greedy_tokens_are_hfs[qwen2_5_vl]",
    "qwen2_audio": "models.test_clip_laws::test_the_engines_greedy_tokens_are_hfs[qwen2_audio]",
    "qwen2_vl": "models.test_qwen2_vl_checkpoint::test_the_engine_says_of_a_video_what_hf_says",
    "qwen3_asr": "models.test_qwen3_asr_transcripts::test_a_clip_of_several_windows",
    "qwen3_vl": "models.test_video_laws::"
    "test_states_logits_and_the_engines_tokens_are_hfs[qwen3_vl]",
    "qwen_vl": "models.test_qwen_vl::test_embeddings_logits_and_tokens_are_the_published_ones",
    "ultravox": "models.test_ultravox::test_ids_logits_and_tokens_are_the_published_ones",
    "voxtral": "models.test_clip_laws::test_logits_at_every_position_are_hfs[voxtral]",
    "whisper": "models.test_whisper_transcripts::test_a_short_clip_with_times",
}
"""Whose first variant the slow run compares in `test_array_laws.py`, since another default test has
its mechanisms: `test_default_run.py` sees that it is in the default run.

Of Qwen3.5 the row with experts, which has a shared one beside them, and MiniCPM-V 4.7, whose
decoder it is and which differs from 4.6 by positions alone, are in the default run; of Qwen3-VL
with experts, Qwen3-VL and InternVL's experts; of GLM-4V the row with experts, whose tower it is,
and GLM-OCR; of Idefics3, SmolVLM.
"""

NAMED_AS_MODULES = {
    *("deepseek_ocr", "deepseek_ocr2", "gemma4", "gemma4_unified", "idefics3", "lfm2_vl", "llama4"),
    *("ovis2", "qwen3_asr", "qwen3_vl", "unlimited_ocr", "whisper"),
}
"""Whose files have the names of HF's module, all of them, and no others: their published sizes are
read in the slow run, since `test_array_laws.py` has a small tree, each tensor in its place."""

READ_ELSEWHERE = {
    # Tiny files under their published names are answered from by default:
    "deepseek_vl2",  # test_deepseek_vl2.py
    "molmo",  # test_molmo_engine.py
    "qwen_vl",  # test_qwen_vl.py
    "blip2_t5",  # test_blip2_t5.py; its tower and queries are BLIP-2's
    "kimi_k25",  # test_kimi_k25_files.py; its 384 experts take a minute to list
}
"""Whose published sizes are read in the slow run, too."""

ASKED: dict[str, Collection[str]] = {
    # ---- an engine's answers
    # Of one device, `schedules` has another; of a decoder alone over four devices,
    # tests/engine/test_parallel.py, and of a packed tower over two, test_packing.py there.
    "answers of one pass": {"florence2"},
    # Of units beside tokens alone, as LLaVA's, tests/parity/test_parity.py asks Gemma 3's engine.
    # Items that are inserted before a prompt are in test_blip2_t5.py. Of states beside the cache an
    # engine is compared with one pass in tests/engine/test_recurrent_families.py, and one pass with
    # HF in test_array_laws.py, as one of sinks and of experts.
    "HF's tokens": {"paligemma", "qwen2_5_vl"},
    # Of every family, test_array_laws.py compares logits of other weights.
    "HF's logits": {"paligemma"},
    # Gemma 3's rows of an item, which see each other, and windows are in test_draft.py; Molmo 2's
    # in `fields kept on the host`.
    # Encoder-decoders are in test_encoder_decoder.py, and Florence-2's answers, in chunks and
    # preempted, in `answers of one pass`; Qwen3-VL's in chunks are in `HF's tokens of videos`.
    "schedules": {"gemma4"},
    # Time stamps among packed patches. test_array_laws.py has videos of SmolVLM, which are squares,
    # by default, and of every family in the slow run.
    "HF's tokens of videos": {"qwen3_vl"},
    # Items of many sizes have more programs to compile; tests of transcripts have a few of those,
    # `schedules` those of Gemma 4, and test_qwen2_5_omni.py those of that.
    "HF's tokens of clips": {"qwen2_audio"},
    # Of the others an engine's tokens are compared, or clips' logits in test_array_laws.py
    # (Gemma 4) and in test_qwen2_5_omni.py.
    "HF's logits of clips": {"voxtral"},
    # Packs of patches.
    "encoder workers": {"qwen2_vl"},
    "rows of encoders on disk": {"qwen2_vl"},
    # Requests of an encoder-decoder share no blocks. One, whose rows of a picture see each other:
    # each takes half a minute.
    "host memory": {"gemma3"},
    "fields kept on the host": {"gemma3", "molmo2"},
    # ---- over HTTP, and other doors
    "HTTP": {"qwen2_audio"},
    "damage that parity names": {"smolvlm"},
    # ---- weights
    # A transposed matrix and a tied head; an axis less; fused attention; stacks of experts.
    "updates of weights": {"florence2", "internvl", "qwen2_vl", "qwen3_vl_moe"},
    # Gemma 4's decoder has most kinds of layers; engines of Gemma 3 are in `tests/layers`.
    "8 bits": {"gemma4"},
    "4 bits": {"qwen2_vl"},
    # Of the decoder alone, tests/checkpoints/test_italian.py asks PEFT, and test_text_rules.py.
    "PEFT's towers": {"qwen2_vl"},
    "PEFT's rank 1": {"internvl"},
    # ---- training
    "gradients": {"llava"},
    # Packs, and an encoder-decoder.
    "scores": {"florence2", "qwen2_vl"},
    # ---- processors, and sizes as published
    # Planned sizes are the law of dummies, which all families are under: here are squares that
    # follow a picture's form, grids of patches, and frames beside pictures.
    "described sizes": {"gemma4", "internvl", "qwen3_vl"},
    # Tiny models' shapes are compared with HF's (test_array_laws.py): here are a tower of units,
    # one of packed patches, an encoder-decoder, and clips.
    "published shapes": {"florence2", "gemma3", "paddleocr_vl", "voxtral"},
    "pictures decoded side by side": {"gemma3", "llava", "qwen2_vl"},
}
"""Names of families that the default run asks, by law; others are slow rows of it."""


def slow_unless(condition: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Return a row's marks: none if the default run has it."""
    return () if condition else (pytest.mark.slow,)


def mark(law: str, name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a law's row of a family."""
    return slow_unless(name in ASKED[law])


def rows(law: str, names: Iterable[str]) -> list[Any]:
    """Return a law's rows of the names of families."""
    return [pytest.param(name, marks=mark(law, name)) for name in names]
