"""The configuration of LoRA adapters; `mmjax.config.engine_config` has it among the others."""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from mmjax.config.settings import check_settings, setting
from mmjax.errors import ConfigError

LoRADtypeName = Literal["auto", "float32", "bfloat16"]

ADAPTER_NAME = r"^[A-Za-z0-9._/-]{1,128}$"
"""Pattern of adapters' names."""


_MODULE_KEYS = {"name", "path", "base_model_name"}
"""Of vLLM's objects; the last has no effect: all adapters are of the one model."""


def _read_module(text: str) -> tuple[str, str] | None:
    """Return the name and the path of one of `lora_modules`; None where it is malformed."""
    if text.startswith("{"):
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not all(isinstance(given.get(key), str) for key in ("name", "path")):
            return None
        if not given.keys() <= _MODULE_KEYS:
            return None
        name, path = given["name"], given["path"]
    else:
        name, _, path = text.partition("=")
    return (name, path) if path and re.match(ADAPTER_NAME, name) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters: how many, how large, and where they are from."""

    enable_lora: bool = setting(False, "Whether requests may name LoRA adapters (docs/lora.md).")
    lora_modules: tuple[str, ...] = setting(
        (),
        """Adapters that are loaded at the start, each as NAME=PATH or as vLLM's JSON object with
        `name` and `path`: a directory that PEFT wrote, or a hub id. Requests name one as their
        `model`.""",
        unset="none",
        is_valid=lambda module: _read_module(module) is not None,
        expected="adapters as NAME=PATH, or as a JSON object with `name` and `path` (and "
        "`base_model_name`), a name of at most 128 letters, digits and `._/-`",
        is_for_serve_alone=True,
    )
    max_loras: int = setting(
        4, "Adapters that a step may compute with; memory is planned for so many.", minimum=1
    )
    max_lora_rank: int = setting(
        16,
        "Largest rank of an adapter; memory is planned for adapters of it.",
        minimum=1,
        maximum=1024,
    )
    max_cpu_loras: int | None = setting(
        None,
        """Adapters that are kept in the host's memory, the least recently used are read from their
        files again.""",
        unset="twice `max_loras`",
        minimum=1,
    )
    lora_dtype: LoRADtypeName = setting("auto", "Of adapters. auto: as the weights.")
    enable_tower_connector_lora: bool = setting(
        False,
        """Whether adapters may adapt towers and connectors, too; an image is then encoded anew for
        each adapter.""",
    )
    allow_runtime_lora_updating: bool = setting(
        False,
        """Whether clients may load and unload adapters by `/v1/load_lora_adapter` and
        `/v1/unload_lora_adapter`; only for trusted clients.""",
        is_for_serve_alone=True,
    )
    lora_dir: Path | None = setting(
        None,
        "Directory below which clients may load adapters from, after links are resolved.",
        unset="none",
        is_for_serve_alone=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if given and not self.enable_lora:
            raise ConfigError(f"`{given[0]}` is set without `enable_lora`; give both")
        if self.allow_runtime_lora_updating and self.lora_dir is None:
            raise ConfigError(
                "`allow_runtime_lora_updating` is set without `lora_dir`; give the directory that "
                "clients may load adapters from"
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"`max_cpu_loras` is {self.max_cpu_loras}, below `max_loras` ({self.max_loras}); "
                "give at least as many"
            )
        names = [name for name, _ in self.modules]
        if len(set(names)) < len(names):
            raise ConfigError(f"`lora_modules` gives {names}; give each adapter its own name")

    @property
    def modules(self) -> list[tuple[str, str]]:
        """Name and path of each of `lora_modules`."""
        read = map(_read_module, self.lora_modules)
        return [module for module in read if module is not None]
