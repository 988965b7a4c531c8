"""Write docs/configuration.md from the settings that `mmjax.config.engine_config` declares.

`.venv/bin/python docs/make_configuration.py`; a test holds the page to what this writes.
"""

from collections.abc import Iterator
from pathlib import Path

from mmjax.config.engine_config import SETTING_CLASSES, llm_settings
from mmjax.config.refused_flags import HELD_FLAGS
from mmjax.config.settings import Setting, settings_of

PAGE = Path(__file__).resolve().parent / "configuration.md"

INTRODUCTION = """\
# Configuration

Written by `docs/make_configuration.py` from the dataclasses that
`mmjax/config/engine_config.py` lists: change a setting there, and run `make docs`.

A setting has one name, and up to three places:

- a flag of `python -m mmjax.serve`: `--max-num-seqs 8`. Booleans are set by
  `--enable-prefix-caching` and `--no-enable-prefix-caching`; mappings are JSON; integers may have
  a unit, `4k` for 4,000 and `4K` for 4,096 (also m, g, t and M, G, T);
- a key of the file of `--config FILE.yaml`, in either spelling. A flag overrides the file, which
  overrides the default:

  ```yaml
  model: google/gemma-3-4b-it
  max-num-seqs: 8
  limit_mm_per_prompt: {image: 4}
  api-key: [first-key, second-key]
  ```

- a keyword of `mmjax.LLM`, unless it concerns only the server:
  `LLM("google/gemma-3-4b-it", max_num_seqs=8)`.

A few are also read from the environment, which the file and a flag override: their rows say so.
`mmjax config [MODEL] [--config FILE.yaml] [--FLAG VALUE ...]` prints each setting's value and
whether it is from a flag, the file, the environment or the default, as such a file;
`python -m mmjax.serve --dump-config` prints the same.

vLLM's flags have vLLM's meaning, or are refused with the reason and what to give instead. Those
that say what is so anyway are taken, as flags, keys and keywords: {held}

`null` and `None` mean the default. Errors name the nearest known setting, or the expected values.
"""


def make_page() -> str:
    """Return the page: a table for each group of settings."""
    return "\n".join([INTRODUCTION.replace("{held}", _list_held()), *_make_groups()])


def _list_held() -> str:
    shown = (
        " or ".join(f"`{' '.join((flag, value))}`" for value in values) or f"`{flag}`"
        for flag, values in HELD_FLAGS.items()
    )
    return ", ".join(shown) + "."


def _make_groups() -> Iterator[str]:
    for title, config_class in SETTING_CLASSES.items():
        yield f"## {title.capitalize()}\n"
        yield (config_class.__doc__ or "").partition("\n")[0] + "\n"
        yield "| flag | key | `LLM` | value | default | what it does |"
        yield "|---|---|---|---|---|---|"
        yield from map(_make_row, settings_of(config_class))
        yield ""


def _make_row(one: Setting) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (one.flag, one.alias) if flag is not None)
    is_keyword = "yes" if one.name in llm_settings() else "no"
    default = one.default_text if one.unset is not None else f"`{one.default_text}`"
    variable = "" if one.environment is None else f" In the environment: `{one.environment}`."
    cells = (flags, f"`{one.name}`", is_keyword, one.expected, default, one.help + variable)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
