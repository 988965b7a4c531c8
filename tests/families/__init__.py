"""The table of served families, over which every law is tested; README.md says how one is added.

`served_model` makes the models that engines serve, once each.
"""

from functools import cache

from tests.families.aya_vision import AYA_VISION, COHERE2_VISION
from tests.families.blip2 import BLIP2
from tests.families.blip2_t5 import BLIP2_T5
from tests.families.chameleon import CHAMELEON
from tests.families.deepseek_ocr2 import DEEPSEEK_OCR2
from tests.families.deepseek_vl2 import DEEPSEEK_VL2
from tests.families.ernie4_5_vl import ERNIE4_5_VL
from tests.families.exaone4_5 import EXAONE4_5
from tests.families.florence2 import FLORENCE2
from tests.families.fuyu import FUYU
from tests.families.gemma3 import GEMMA3
from tests.families.gemma4 import GEMMA4, GEMMA4_CLIPS, GEMMA4_UNIFIED, GEMMA4_UNIFIED_CLIPS
from tests.families.glm4v import GLM4V, GLM4V_MOE, GLM46V, GLM_OCR
from tests.families.got_ocr2 import GOT_OCR2
from tests.families.granite4_vision import GRANITE4_VISION
from tests.families.granite_docling import GRANITE_DOCLING
from tests.families.hunyuan_vl import HUNYUAN_VL
from tests.families.idefics3 import IDEFICS3, SMOLVLM
from tests.families.internvl import INTERNVL, INTERNVL_GPT_OSS, INTERNVL_ORIGINAL
from tests.families.kimi_k25 import KIMI_K25
from tests.families.lfm2_vl import LFM2_VL
from tests.families.lfm3_vl import LFM3_VL
from tests.families.llama4 import LLAMA4
from tests.families.llava import LLAVA, LLAVA_SIGLIP
from tests.families.llava_next import LLAVA_NEXT
from tests.families.llava_onevision import LLAVA_ONEVISION
from tests.families.minicpmv4_6 import MINICPM_OCR, MINICPMV4_6, MINICPMV4_7
from tests.families.mistral3 import LIGHTON_OCR, MISTRAL3
from tests.families.mllama import MLLAMA
from tests.families.molmo import MOLMO
from tests.families.molmo2 import MOLMO2
from tests.families.ovis2 import OVIS2
from tests.families.paddleocr_vl import PADDLEOCR_VL
from tests.families.paligemma import PALIGEMMA
from tests.families.pixtral import PIXTRAL
from tests.families.qianfan_ocr import QIANFAN_OCR
from tests.families.qwen2_5_omni import QWEN2_5_OMNI, QWEN2_5_OMNI_CLIPS
from tests.families.qwen2_audio import QWEN2_AUDIO
from tests.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from tests.families.qwen3_asr import QWEN3_ASR
from tests.families.qwen3_omni import QWEN3_OMNI, QWEN3_OMNI_CLIPS
from tests.families.qwen3_vl import QWEN3_5, QWEN3_5_MOE, QWEN3_VL, QWEN3_VL_MOE
from tests.families.qwen_vl import QWEN_VL
from tests.families.tiny import TinyModel
from tests.families.ultravox import ULTRAVOX
from tests.families.unlimited_ocr import DEEPSEEK_OCR, UNLIMITED_OCR
from tests.families.voxtral import VOXTRAL
from tests.families.whisper import WHISPER

_ROWS = (
    AYA_VISION,
    BLIP2,
    BLIP2_T5,
    CHAMELEON,
    COHERE2_VISION,
    DEEPSEEK_OCR,
    DEEPSEEK_OCR2,
    DEEPSEEK_VL2,
    EXAONE4_5,
    ERNIE4_5_VL,
    FLORENCE2,
    FUYU,
    GEMMA3,
    GEMMA4,
    GEMMA4_UNIFIED,
    GLM4V,
    GLM4V_MOE,
    GLM46V,
    GLM_OCR,
    GOT_OCR2,
    GRANITE4_VISION,
    GRANITE_DOCLING,
    HUNYUAN_VL,
    IDEFICS3,
    INTERNVL,
    INTERNVL_GPT_OSS,
    INTERNVL_ORIGINAL,
    KIMI_K25,
    LFM2_VL,
    LFM3_VL,
    LLAMA4,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    LLAVA_SIGLIP,
    LIGHTON_OCR,
    MINICPM_OCR,
    MINICPMV4_6,
    MINICPMV4_7,
    MISTRAL3,
    MLLAMA,
    MOLMO,
    MOLMO2,
    OVIS2,
    PADDLEOCR_VL,
    PALIGEMMA,
    PIXTRAL,
    QIANFAN_OCR,
    QWEN2_5_OMNI,
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_OMNI,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN_VL,
    SMOLVLM,
    UNLIMITED_OCR,
)
FAMILIES = {row.name: row for row in _ROWS}
"""Of models that take pictures."""
CLIP_FAMILIES = {
    row.name: row
    for row in (
        *(GEMMA4_CLIPS, GEMMA4_UNIFIED_CLIPS, QWEN2_5_OMNI_CLIPS, QWEN2_AUDIO, QWEN3_OMNI_CLIPS),
        *(QWEN3_ASR, ULTRAVOX, VOXTRAL),
        WHISPER,
    )
}
"""Of models that take clips of sound; of those that take pictures, too, as asked about clips."""
ALL_FAMILIES = {**FAMILIES, **CLIP_FAMILIES}
TINY_FAMILIES = {name: row.tiny for name, row in ALL_FAMILIES.items() if row.tiny is not None}
"""Those that transformers has a class of, whose arrays are compared with it."""


@cache
def served_model(name: str) -> TinyModel:
    """Return the model that engines serve in tests."""
    family = TINY_FAMILIES[name]
    return TinyModel(family, **family.served)
