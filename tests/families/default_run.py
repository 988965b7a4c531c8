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
    "blip2": (
        "cross-attention in every block, a text branch, another decoder",
        "other tower",
    ),
    "chameleon": ("norms behind, shared key heads",),
    "florence2": (
        "wide images, deeper stages, scaled embeddings, a head of its own",
        "three stages, norms elsewhere, other heads and depths, relu",
    ),
    "internvl": (
        "qwen3 with experts, one layer without",
        "phi3",
        "internlm3",
        "first state, no squares",
    ),
    "qwen2_audio": ("one key head, another activation, an odd number of states",),
    "voxtral": ("one key head, other activations, two states an embedding",),
    "whisper": ("scaled embeddings that are not, a head of its own, other depths and heads, relu",),
}
"""Whose arrays are compared with HF's by default beside the first, by family. What the others vary
is compared by parts, too, in `tests/towers` and `tests/language`."""

HELD_ELSEWHERE = {
    # Other parts of another row's, which is in the default run.
    *("cohere2_vision", "deepseek_ocr", "glm46v", "glm4v", "idefics3", "lighton_ocr"),
    *("minicpm_ocr", "minicpmv4_6", "qianfan_ocr", "qwen3_5", "qwen3_vl_moe", "ultravox"),
    # A directory's logits, or its greedy tokens, are compared with HF's by default:
    "blip2_t5",  # test_blip2_t5.py
    "deepseek_ocr2",  # test_deepseek_ocr2.py
    "florence2",  # test_florence2_llm.py; other variants are above
    "gemma3",  # tests/parity/test_parity.py
    "paligemma",  # test_hf_answers.py
    "pixtral",  # test_pixtral_directory.py
    "qwen2_5_omni",  # test_qwen2_5_omni.py
    "qwen2_5_vl",  # test_hf_answers.py
    "qwen2_vl",  # test_qwen2_vl_checkpoint.py
    "qwen2_audio",  # test_clip_laws.py; another variant is above
    "qwen3_asr",  # test_qwen3_asr_transcripts.py
    "qwen3_vl",  # test_video_laws.py
    "voxtral",  # test_clip_laws.py; another variant is above
    "whisper",  # test_whisper_transcripts.py; another variant is above
}
"""Whose first variant the slow run compares in `test_array_laws.py`, since another default test has
its mechanisms.

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
    # Of one device, `schedules` has two more; of a decoder alone over four devices,
    # tests/engine/test_parallel.py, and of a packed tower over two, test_packing.py there.
    "answers of one pass": {"florence2"},
    # Of units beside tokens alone, as LLaVA's, tests/parity/test_parity.py asks Gemma 3's engine.
    # Items that are inserted before a prompt are in test_blip2_t5.py. Of states beside the cache an
    # engine is compared with one pass in tests/engine/test_recurrent_families.py, and one pass with
    # HF in test_array_laws.py, as one of sinks and of experts.
    "HF's tokens": {"paligemma", "qwen2_5_vl"},
    # Of every family, test_array_laws.py compares logits of other weights.
    "HF's logits": {"paligemma"},
    # Gemma 3's rows of an item, which see each other, and windows are in test_mixed_fields.py.
    # Encoder-decoders are in test_encoder_decoder.py, and Florence-2's answers, in chunks and
    # preempted, in `answers of one pass`; Qwen3-VL's in chunks are in `HF's tokens of videos`.
    "schedules": {"gemma4", "molmo2"},
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
    "PEFT's towers": {"gemma3", "qwen2_vl"},
    "PEFT's rank 1": {"internvl"},
    # ---- training
    "gradients": {"llava"},
    # Units, packs, spans within images, an encoder-decoder.
    "scores": {"florence2", "gemma3", "qwen2_vl"},
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
