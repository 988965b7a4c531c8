"""One module a family; each gives `FAMILY`, and the laws and goldens run over all of them."""

from importlib import import_module
from pkgutil import iter_modules

from tests.processing.families.family import Family

FAMILIES: dict[str, Family] = {
    module.name: import_module(f"{__name__}.{module.name}").FAMILY
    for module in iter_modules(__path__)
    if module.name != "family"
}
"""By the folder in `mmjax/models`."""

VARIANTS: dict[str, Family] = {
    name: variant
    for family in FAMILIES
    for name, variant in getattr(
        import_module(f"{__name__}.{family}"), "VARIANTS", dict[str, Family]()
    ).items()
}
"""Checkpoints of a family whose prompts are processed in another way; under the same laws."""
