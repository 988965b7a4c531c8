"""Settings: dataclass fields from which flags, keywords, YAML keys and documentation are derived.

They are declared in `mmjax.config.engine_config`.
"""

import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mmjax.errors import ConfigError

ListFlag = Literal["words", "commas", "json"]
"""Syntax of a flag with several values: `--x a b`, `--x a,b` or `--x '["a", "b"]'`."""

_METADATA_KEY = "mmjax.setting"
_PAGE = "docs/configuration.md"

_shorten = Repr()
_shorten.maxstring = _shorten.maxother = 80


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    name: str | None = None,
    alias: str | None = None,
    unset: str | None = None,
    minimum: int | float | None = None,
    above: int | float | None = None,
    maximum: int | float | None = None,
    is_valid: Callable[[Any], bool] | None = None,
    expected: str | None = None,
    list_flag: ListFlag = "words",
    is_secret: bool = False,
    is_for_serve_alone: bool = False,
    environment: str | None = None,
) -> Any:
    """Declare a dataclass field that is a setting; it is parsed by its annotation.

    Annotations: bool, int, float, str, Path, Literal, Mapping[str, Any], tuple[str, ...], and each
    of them or None. A float is always finite.

    Args:
        default: Without one, the field is required, and set by mmjax if the operator does not.
        help: One or two sentences for `--help` and docs/configuration.md.
        name: Keyword and YAML key, and in kebab-case the flag; default: the field's name.
        alias: Another flag, such as `-tp`.
        unset: Description of the default, if its value does not say enough.
        minimum: Inclusive lower bound.
        above: Exclusive lower bound.
        maximum: Inclusive upper bound.
        is_valid: A further condition, for a tuple on each text; `expected` must describe it.
        expected: Description of valid values; default: from annotation and bounds.
        list_flag: Syntax of the flag of a tuple.
        is_secret: Whether messages omit the value.
        is_for_serve_alone: Whether `LLM` does not have it.
        environment: Variable that sets it for `mmjax.serve` where neither flag nor file does.
    """
    declaration = {
        "name": name,
        "help": " ".join(help.split()),
        "alias": alias,
        "unset": unset,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "is_valid": is_valid,
        "own_expected": expected,
        "list_flag": list_flag,
        "is_secret": is_secret,
        "is_for_serve_alone": is_for_serve_alone,
        "environment": environment,
    }
    metadata = {_METADATA_KEY: declaration}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata, repr=not is_secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A declared setting: its names, type, bounds and documentation."""

    field: str
    """Name of the dataclass field."""
    name: str
    annotation: Any
    """The field's annotation."""
    kind: Any
    """One of bool, int, float, str, Path, Literal, Mapping, tuple."""
    choices: tuple[str, ...]
    """Of a Literal."""
    is_optional: bool
    default: Any
    help: str
    alias: str | None
    unset: str | None
    minimum: int | float | None
    above: int | float | None
    maximum: int | float | None
    is_valid: Callable[[Any], bool] | None
    own_expected: str | None
    list_flag: ListFlag
    is_secret: bool
    is_for_serve_alone: bool
    environment: str | None

    @property
    def flag(self) -> str:
        """Its flag of `mmjax.serve`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def expected(self) -> str:
        """Description of valid values, such as "an integer of at least 1"."""
        if self.own_expected is not None:
            return self.own_expected
        if self.kind is Literal:
            return f"one of {', '.join(self.choices)}"
        return _KINDS[self.kind].expected + self._bounds

    @property
    def default_text(self) -> str:
        """The default as an operator would write it, or `unset`."""
        if self.unset is not None:
            return self.unset
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return ",".join(self.default) if self.kind is tuple else str(self.default)

    @property
    def _bounds(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f" from {self.minimum} to {self.maximum}"
        bounds = (
            ("of at least", self.minimum),
            ("above", self.above),
            ("of at most", self.maximum),
        )
        said = " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)
        return f" {said}" if said else ""

    def parse(self, value: object, label: str | None = None) -> Any:
        """Return `value` converted to the field's type; None: the default; ConfigError if invalid.

        Args:
            value: A Python value, from a keyword or a YAML file.
            label: The setting's name as the operator wrote it, for errors.
        """
        if value is None:
            return self.default
        try:
            converted = _KINDS[self.kind].convert(value)
        except (TypeError, ValueError, OverflowError):
            raise self.error(value, label) from None
        if not self._accepts(converted):
            raise self.error(value, label)
        return converted

    def parse_text(self, text: str, label: str | None = None) -> Any:
        """Parse a flag's text; else as `parse`."""
        try:
            value = self._read(text)
        except ValueError:
            raise self.error(text, label) from None
        return self.parse(value, label)

    def error(self, value: object, label: str | None = None) -> ConfigError:
        """Return the error that names the setting, the value and what was expected."""
        shown = "'***'" if self.is_secret else _shorten.repr(value)
        return ConfigError(f"`{label or self.name}` is {shown}; expected {self.expected}")

    def _read(self, text: str) -> Any:
        if self.kind is tuple:
            if self.list_flag == "commas":
                return [part.strip() for part in text.split(",") if part.strip()]
            return json.loads(text) if self.list_flag == "json" else [text]
        read = _KINDS[self.kind].read
        return text if read is None else read(text)

    def _accepts(self, value: Any) -> bool:
        if self.kind is Literal:
            return value in self.choices
        if self.minimum is not None and value < self.minimum:
            return False
        if self.above is not None and value <= self.above:
            return False
        if self.maximum is not None and value > self.maximum:
            return False
        if self.is_valid is None:
            return True
        return all(map(self.is_valid, value if self.kind is tuple else (value,)))


@cache
def settings_of(config_class: type) -> tuple[Setting, ...]:
    """Return the settings among a dataclass's fields, in their order."""
    hints = get_type_hints(config_class)
    return tuple(
        _make_setting(one, hints[one.name], one.metadata[_METADATA_KEY])
        for one in fields(config_class)
        if _METADATA_KEY in one.metadata
    )


def check_settings(config: Any) -> None:
    """Raise ConfigError for the first setting of a dataclass with an invalid value."""
    for one in settings_of(type(config)):
        value = getattr(config, one.field)
        if value is None and one.is_optional:
            continue
        if value is None:
            raise one.error(value)
        one.parse(value)


def nearest_name(name: str, known: Mapping[str, Any], *, page: str = _PAGE) -> str:
    """Return a question with the nearest known name, or a reference to `page`."""
    nearest = get_close_matches(name, known, n=1)
    return f"do you mean `{nearest[0]}`?" if nearest else f"{page} lists all"


def _make_setting(one: Any, annotation: Any, declaration: Mapping[str, Any]) -> Setting:
    kind, is_optional = _without_none(annotation)
    origin = get_origin(kind) or kind
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    return Setting(
        **{**declaration, "name": declaration["name"] or one.name},
        field=one.name,
        annotation=annotation,
        kind=origin,
        choices=get_args(kind) if origin is Literal else (),
        is_optional=is_optional,
        default=None if default is MISSING else default,
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, False
    (kind,) = (one for one in get_args(annotation) if one is not NoneType)
    return kind, True


def _to_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _to_int(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]


_UNITS: Mapping[str, int] = {
    **{name: 10**power for name, power in (("k", 3), ("m", 6), ("g", 9), ("t", 12))},
    **{name: 2**power for name, power in (("K", 10), ("M", 20), ("G", 30), ("T", 40))},
}


def _read_int(text: str) -> int:
    """Read `25.6k` as 25600 and `4K` as 4096, as vLLM does; ValueError if it is no integer."""
    unit = _UNITS.get(text[-1:])
    if unit is None:
        return int(text)
    if not text[:-1].replace(".", "", 1).isdecimal():
        raise ValueError(text)
    number = Decimal(text[:-1]) * unit
    if number != number.to_integral_value():
        raise ValueError(text)
    return int(number)


def _to_float(value: object) -> float:
    if isinstance(value, bool | str):
        raise TypeError
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _to_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise TypeError
    return Path(value).expanduser()


def _to_mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError
    return value


def _to_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise TypeError
    return tuple(value)


@dataclass(frozen=True, slots=True)
class _Kind:
    expected: str
    convert: Callable[[object], Any]
    read: Callable[[str], Any] | None = None
    """Parser of a flag's text; None: the text itself."""


_KINDS: dict[Any, _Kind] = {
    bool: _Kind("true or false", _to_bool),
    int: _Kind("an integer", _to_int, _read_int),
    float: _Kind("a number", _to_float, float),
    str: _Kind("a text", _to_text),
    Path: _Kind("a path", _to_path),
    Literal: _Kind("one of its names", _to_text),
    Mapping: _Kind("a mapping (JSON object)", _to_mapping, json.loads),
    tuple: _Kind("a list of texts", _to_texts),
}
