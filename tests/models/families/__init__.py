"""The table of tiny families that every law of the arrays is tested over; a new family adds a row.

`served_model` makes the models that engines serve, once each.
"""

from functools import cache

from tests.models.families.blip2 import BLIP2
from tests.models.families.chameleon import CHAMELEON
from tests.models.families.family import TinyModel
from tests.models.families.florence2 import FLORENCE2
from tests.models.families.fuyu import FUYU
from tests.models.families.gemma3 import GEMMA3
from tests.models.families.internvl import INTERNVL
from tests.models.families.llava import LLAVA, PIXTRAL
from tests.models.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL

_ROWS = (
    GEMMA3,
    LLAVA,
    PIXTRAL,
    QWEN2_VL,
    QWEN2_5_VL,
    INTERNVL,
    FUYU,
    BLIP2,
    CHAMELEON,
    FLORENCE2,
)
TINY_FAMILIES = {family.name: family for family in _ROWS}


@cache
def served_model(name: str) -> TinyModel:
    """Return the model that engines serve in tests."""
    family = TINY_FAMILIES[name]
    return TinyModel(family, **family.served)
