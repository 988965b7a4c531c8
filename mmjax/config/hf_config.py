"""What mmjax reads of a checkpoint's configuration, which transformers parses."""

from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def read_config(kind: type[T], hf_config: Any, *more: str, **own: Any) -> T:
    """Return a dataclass of the fields that `hf_config` has by the same names, lists as tuples.

    Args:
        kind: The dataclass.
        hf_config: HF's configuration.
        more: Fields to read that have a default: others may be keys that HF's model does not obey.
        own: Fields that are not read.
    """
    wanted = [one.name for one in fields(kind) if one.default is MISSING]  # type: ignore[arg-type]
    values = {
        name: getattr(hf_config, name) for name in (*wanted, *more) if hasattr(hf_config, name)
    }
    kept = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return kind(**{**kept, **own})
