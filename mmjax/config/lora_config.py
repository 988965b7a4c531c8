"""The configuration of LoRA adapters; `mmjax.config.engine_config` has it among the others."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from mmjax.config.settings import check_settings, setting
from mmjax.errors import ConfigError

LoRADtypeName = Literal["auto", "float32", "bfloat16"]

ADAPTER_NAME = r"^[A-Za-z0-9._/-]{1,128}$"
"""Pattern of adapters' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters: how many, how large, and where they are from."""

    enable_lora: bool = setting(False, "Whether requests may name LoRA adapters (docs/lora.md).")
    lora_modules: tuple[str, ...] = setting(
        (),
        """Adapters that are loaded at the start, each as NAME=PATH: a directory that PEFT wrote, or
        a hub id. Requests name one as their `model`.""",
        unset="none",
        is_valid=lambda module: re.match(rf"{ADAPTER_NAME[:-1]}=.", module) is not None,
        expected="adapters as NAME=PATH, a name of at most 128 letters, digits and `._/-`",
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
        parts = (module.partition("=") for module in self.lora_modules)
        return [(name, path) for name, _, path in parts]
