"""A setting is one field; its flag, keyword, YAML key and row of the docs are made of it."""

import inspect
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from docs.make_configuration import PAGE, make_page
from mmjax import LLM
from mmjax.config.engine_config import (
    SETTING_CLASSES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    llm_settings,
    serve_settings,
)
from mmjax.config.settings import Setting, check_settings, setting, settings_of
from mmjax.errors import ConfigError
from mmjax.server.flags import parse_flags, to_engine_config


@dataclass(frozen=True, slots=True, kw_only=True)
class WithDraftTokens(SchedulerConfig):
    """How much work one step may hold, and a setting that mmjax does not have."""

    max_num_draft_tokens: int = setting(3, "Tokens that are drafted ahead.", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithBacklog(ServerConfig):
    """The HTTP server, and a setting that mmjax does not have."""

    backlog: int | None = setting(None, "Connections that may wait.", unset="the system's", above=0)


@pytest.fixture
def is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTING_CLASSES, "scheduler", WithDraftTokens)
    monkeypatch.setitem(SETTING_CLASSES, "server", WithBacklog)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The configurations that LLMs are opened with; none is."""
    configs: list[EngineConfig] = []
    monkeypatch.setattr(LLM, "_open", lambda self, config, devices: configs.append(config))
    return configs


# ---- one field, four places ----------------------------------------------------------------------


@pytest.mark.usefixtures("is_added")
def test_a_field_gives_a_flag_a_key_a_keyword_and_a_row(
    tiny_gemma3: Path, tmp_path: Path, opened: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-draft-tokens: 5\n")
    model = str(tiny_gemma3)
    for argv, value in (([], 3), (["--max-num-draft-tokens", "4"], 4), (["--config", file], 5)):
        config = to_engine_config(parse_flags([model, *map(str, argv)]))
        assert isinstance(config.scheduler, WithDraftTokens)
        assert config.scheduler.max_num_draft_tokens == value

    LLM(model, max_num_draft_tokens=6)
    assert opened[0].scheduler.max_num_draft_tokens == 6
    assert inspect.signature(LLM).parameters["max_num_draft_tokens"].default == 3

    row = (
        "| `--max-num-draft-tokens` | `max_num_draft_tokens` | yes | an integer of at least 1 "
        "| `3` | Tokens that are drafted ahead. |"
    )
    assert row in make_page().splitlines()
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    assert "Tokens that are drafted ahead. (default: 3)" in capsys.readouterr().out


@pytest.mark.usefixtures("is_added")
def test_a_wrong_value_is_told_in_the_readers_own_spelling(
    tmp_path: Path, opened: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-draft-tokens: 0\n")
    expected = "expected an integer of at least 1"
    with pytest.raises(SystemExit):
        parse_flags(["--max-num-draft-tokens", "x"])
    assert f"error: `--max-num-draft-tokens` is 'x'; {expected}\n" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_flags(["--config", str(file)])
    assert f"{file}: `max-num-draft-tokens` is 0; {expected}\n" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"^`max_num_draft_tokens` is 0; {expected}$"):
        LLM(max_num_draft_tokens=0)
    with pytest.raises(ConfigError, match=f"^`max_num_draft_tokens` is 0; {expected}$"):
        WithDraftTokens(max_num_draft_tokens=0)
    assert not opened


@pytest.mark.usefixtures("is_added")
def test_a_setting_of_the_server_is_none_of_llms(opened: list[Any]) -> None:
    assert parse_flags(["--backlog", "7"]).backlog == 7
    assert "| `--backlog` | `backlog` | no | an integer above 0 | the system's | " in make_page()
    assert "backlog" not in inspect.signature(LLM).parameters
    with pytest.raises(TypeError, match=r"`backlog` is a setting of `mmjax\.serve` alone"):
        LLM(backlog=7)
    assert not opened


def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "run `make docs`"


def test_names_and_flags_are_given_once_and_explained() -> None:
    every = [one for config_class in SETTING_CLASSES.values() for one in settings_of(config_class)]
    assert len({one.name for one in every}) == len(every) == len(serve_settings())
    assert [one.name for one in every if not one.help.endswith((".", ".)"))] == []
    assert [one.name for one in every if one.default is None and one.unset is None] == []


def test_what_mmjax_finds_itself_is_no_setting() -> None:
    found = {one.field for one in settings_of(ModelConfig)}
    names = {one.name for one in fields(ModelConfig)}
    assert names - found == {"path", "parts", "hf_config", "architecture", "model_class", "mm"}


# ---- LLM -----------------------------------------------------------------------------------------


def test_llm_takes_settings_by_name(tiny_gemma3: Path, opened: list[Any]) -> None:
    LLM(
        tiny_gemma3,
        max_image_pixels=100,
        limit_mm_per_prompt={"image": 1},
        mm_processor_cache_gb=1,
        block_size=np.int64(16),
        compilation_cache_dir="/cache",
        tensor_parallel_size=2,
        use_tqdm_on_load=False,
        compile_threads=2,
        seed=None,
    )
    (config,) = opened
    assert config.model.path == tiny_gemma3
    assert (config.model.mm.max_image_pixels, config.model.mm.limit("image")) == (100, 1)
    assert (config.model.mm.mm_processor_cache_gb, config.cache.block_size) == (1.0, 16)
    assert (config.compilation_cache_dir, config.compile_threads) == (Path("/cache"), 2)
    assert (config.parallel.tensor_parallel_size, config.use_tqdm) == (2, False)
    assert config.model.seed == 0


def test_llms_signature_shows_every_setting() -> None:
    parameters = inspect.signature(LLM).parameters
    assert next(iter(parameters)) == "model"
    assert parameters.keys() == llm_settings().keys() | {"devices", "mesh"}
    assert parameters["model"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert (parameters["max_num_seqs"].default, parameters["max_num_seqs"].annotation) == (16, int)
    assert {"port", "api_key", "log_level", "distributed_process_id"}.isdisjoint(parameters)


@pytest.mark.parametrize(
    ("keyword", "match"),
    [
        ("max_num_sequences", "no setting `max_num_sequences`; do you mean `max_num_seqs`?"),
        ("colour", "no setting `colour`; docs/configuration.md lists all"),
        ("trust_remote_code", "`trust_remote_code` is a setting of vLLM's .* code is never run"),
        ("enforce_eager", "is a setting of vLLM's .* compiled programs; give `--precompile none`"),
        ("port", "`port` is a setting of `mmjax.serve` alone"),
        ("trust_media_ids", "`trust_media_ids` is a setting of `mmjax.serve` alone"),
    ],
)
def test_llm_refuses_other_keywords_by_name(keyword: str, match: str, opened: list[Any]) -> None:
    with pytest.raises(TypeError, match=match.replace("?", r"\?")):
        LLM(**{keyword: 1})
    assert not opened


@pytest.mark.parametrize(
    ("keyword", "value", "expected"),
    [
        ("max_num_seqs", "8", "'8'; expected an integer of at least 1"),
        ("max_num_seqs", True, "True; expected an integer of at least 1"),
        ("max_num_seqs", 2.0, "2.0; expected an integer of at least 1"),
        ("gpu_memory_utilization", 0, "0; expected a number above 0 and of at most 1"),
        ("mm_processor_cache_gb", float("nan"), "nan; expected a number of at least 0"),
        ("enable_prefix_caching", 1, "1; expected true or false"),
        ("limit_mm_per_prompt", [4], r"\[4\]; expected a mapping"),
        ("dtype", "int4", "'int4'; expected one of auto, float32, bfloat16"),
        ("chat_template", 3, "3; expected a text"),
        ("compilation_cache_dir", 3, "3; expected a path"),
    ],
)
def test_llm_checks_values(keyword: str, value: Any, expected: str, opened: list[Any]) -> None:
    with pytest.raises(ConfigError, match=f"^`{keyword}` is {expected}"):
        LLM(**{keyword: value})
    assert not opened


# ---- what a field may say ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """One setting of each kind."""

    flag: bool = setting(False, "A bool.")
    number: int | None = setting(None, "An int.", unset="none", minimum=1, maximum=9)
    share: float = setting(0.5, "A float.", above=0)
    text: str = setting("", "A str.")
    file: Path | None = setting(None, "A path.", unset="none")
    choice: Literal["a", "b"] | None = setting(None, "A choice.", unset="none")
    options: Mapping[str, Any] = setting({"a": 1}, "A mapping.")
    texts: tuple[str, ...] = setting((), "Texts.", list_flag="commas")
    found: int = setting(help="Required.", unset="found elsewhere", name="given")
    private: str | None = None

    def __post_init__(self) -> None:
        check_settings(self)


SETTINGS: dict[str, Setting] = {one.name: one for one in settings_of(Every)}


def test_fields_without_a_declaration_are_no_settings() -> None:
    assert list(SETTINGS) == "flag number share text file choice options texts given".split()
    assert SETTINGS["given"].field == "found"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("number", "3", 3),
        ("share", "1e-3", 0.001),
        ("text", "", ""),
        ("file", "/a", Path("/a")),
        ("choice", "b", "b"),
        ("options", '{"b": [2]}', {"b": [2]}),
        ("texts", "a, b,", ("a", "b")),
    ],
)
def test_texts_become_values(name: str, text: str, value: object) -> None:
    assert SETTINGS[name].parse_text(text) == value
    assert SETTINGS[name].parse(value) == value


def test_a_home_directory_is_found() -> None:
    assert SETTINGS["file"].parse_text("~/a") == Path.home() / "a"


@pytest.mark.parametrize("name", SETTINGS)
def test_none_stands_for_the_default(name: str) -> None:
    assert SETTINGS[name].parse(None) == SETTINGS[name].default


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"flag": 1}, "`flag` is 1; expected true or false"),
        ({"number": 10}, "`number` is 10; expected an integer from 1 to 9"),
        ({"share": 0.0}, "`share` is 0.0; expected a number above 0"),
        ({"share": None}, "`share` is None; expected a number"),
        ({"choice": "c"}, "`choice` is 'c'; expected one of a, b"),
        ({"options": {1: 2}}, "`options` is {1: 2}; expected a mapping"),
        ({"texts": "a"}, "`texts` is 'a'; expected a list of texts"),
        ({"found": "x"}, "`given` is 'x'; expected an integer"),
    ],
)
def test_a_config_made_by_hand_is_checked_alike(values: dict[str, Any], match: str) -> None:
    values = {"found": 1, **values}
    with pytest.raises(ConfigError, match=match):
        Every(**values)


def test_a_required_field_stays_required() -> None:
    with pytest.raises(TypeError, match="found"):
        Every()


def test_defaults_are_not_shared() -> None:
    first, second = Every(found=1), Every(found=1)
    assert first.options == second.options == {"a": 1}
    assert first.options is not second.options


@pytest.mark.parametrize("config", [SchedulerConfig(), CacheConfig(), ParallelConfig()])
def test_configs_travel_to_the_engine(config: object) -> None:
    assert pickle.loads(pickle.dumps(config)) == config


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        SETTINGS["number"].parse_text("x" * 10_000)
    assert len(str(caught.value)) < 200
