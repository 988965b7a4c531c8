"""The command line of `mmjax.serve`, with vLLM's names where vLLM has the setting.

All settings are declared in `mmjax.config`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mmjax.config import SETTING_CLASSES, EngineConfig, ServerConfig, group_fields, serve_settings
from mmjax.errors import ConfigError
from mmjax.model_source import load_engine_config
from mmjax.settings import Setting, nearest_name, settings_of

VLLM_FLAGS_WITHOUT_MEANING_YET = frozenset(
    (
        "--uds --ssl-keyfile --ssl-certfile --middleware "
        "--enable-offline-docs --enable-request-id-headers "
        ""
        "--enable-log-requests --enable-log-outputs --max-log-len "
        "--log-config-file --response-role "
        "--reasoning-parser --tokenizer "
        "--max-num-queued-tokens --kv-cache-dtype "
        "--data-parallel-size "
        "--enforce-eager --generation-config "
        "--override-generation-config --structured-outputs-config --load-format "
        "--download-dir --trust-remote-code --hf-overrides --watchdog-config "
        "--enable-fault-tolerance --media-io-kwargs --mm-encoder-tp-mode "
        "--mm-encoder-only --skip-mm-profiling "
        "--language-model-only "
        "--enable-prompt-tokens-details -q"
    ).split()
)
"""Flags of vLLM that mmjax refuses with a message of their own."""


_METAVARS: dict[Any, str] = {
    int: "INTEGER",
    float: "NUMBER",
    str: "TEXT",
    Path: "PATH",
    Mapping: "JSON",
}
_LIST_METAVARS = {"words": "TEXT", "commas": "TEXT,TEXT", "json": "JSON"}


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return every setting by name; exit with a message if one is wrong.

    A flag overrides the `--config` file, which overrides the default.
    """
    parser = _build_parser()
    namespace, unknown = parser.parse_known_args(argv)
    given = vars(namespace)
    positional, config_file = given.pop("positional_model"), given.pop("config")
    if positional is not None and "model" in given:
        parser.error("the model is given twice; give it once, with or without `--model`")
    if positional is not None:
        given["model"] = positional
    known = serve_settings()
    try:
        for argument in unknown:
            _refuse_unknown(argument.partition("=")[0], "argument")
        values = {name: one.default for name, one in known.items()}
        if config_file is not None:
            values |= _read_config_file(Path(config_file), known)
        for name, value in given.items():
            one = known[name]
            parse = one.parse_text if isinstance(value, str) else one.parse
            values[name] = parse(value, one.flag)
    except ConfigError as error:
        parser.error(str(error))
    return argparse.Namespace(**values)


def to_engine_config(flags: argparse.Namespace) -> EngineConfig:
    """Return P1's configuration, which includes the checkpoint's."""
    return load_engine_config(vars(flags))


def to_server_config(flags: argparse.Namespace) -> ServerConfig:
    """Return the HTTP server's configuration."""
    return SETTING_CLASSES["server"](**group_fields("server", vars(flags)))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mmjax.serve",
        usage="%(prog)s [MODEL] [--config FILE.yaml] [--FLAG VALUE ...]; --help lists all flags",
        description="Serve a multimodal model over OpenAI's HTTP API.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "positional_model", metavar="MODEL", nargs="?", help="the same as --model MODEL"
    )
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="settings by name, as `max-num-seqs: 8`; flags count more",
    )
    for title, config_class in SETTING_CLASSES.items():
        group = parser.add_argument_group(title, (config_class.__doc__ or "").partition("\n")[0])
        for one in settings_of(config_class):
            _add_flag(group, one)
    return parser


def _add_flag(group: Any, one: Setting) -> None:
    # The setting parses values, so that errors are the same as for keywords and YAML keys.
    names = [one.flag, *([one.alias] if one.alias else [])]
    text = f"{one.help} (default: {one.default_text or 'empty'})".replace("%", "%%")
    options: dict[str, Any] = {"dest": one.name, "default": argparse.SUPPRESS, "help": text}
    if one.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif one.kind is Literal:
        options["metavar"] = f"{{{','.join(one.choices)}}}"
    elif one.kind is tuple:
        options["metavar"] = _LIST_METAVARS[one.list_flag]
        options |= {"nargs": "+"} if one.list_flag == "words" else {}
    else:
        options["metavar"] = _METAVARS[one.kind]
    group.add_argument(*names, **options)


def _read_config_file(path: Path, known: Mapping[str, Setting]) -> dict[str, Any]:
    # Imported here: the engine process imports this module, too, and reads no file.
    from mmjax.server.yaml_file import read_yaml_mapping

    values: dict[str, Any] = {}
    try:
        for key, value in read_yaml_mapping(path).items():
            name = key.replace("-", "_")
            if name not in known:
                _refuse_unknown(key, "setting")
            if name in values:
                raise ConfigError(f"`{key}` is given twice; give it once")
            one = known[name]
            parse = one.parse_text if isinstance(value, str) else one.parse
            values[name] = parse(value, key)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return values


def _refuse_unknown(written: str, kind: Literal["argument", "setting"]) -> None:
    """Raise ConfigError for an unknown argument or key."""
    is_setting = kind == "setting"
    flag = f"--{written.replace('_', '-')}" if is_setting else written
    if flag in VLLM_FLAGS_WITHOUT_MEANING_YET:
        raise ConfigError(
            f"`{written}` is a flag of vLLM's that mmjax does not have yet; leave it out"
        )
    settings = serve_settings()
    known = settings if is_setting else {one.flag: one for one in settings.values()}
    if is_setting:
        nearest = nearest_name(written.replace("-", "_"), known)
    else:
        nearest = nearest_name(written, known, page="`--help`")
    raise ConfigError(f"unknown {kind} `{written}`; {nearest}")
