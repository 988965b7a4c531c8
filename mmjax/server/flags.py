"""The command line of `mmjax.serve`, with vLLM's names where vLLM has the setting.

All settings are declared in `mmjax.config.engine_config`.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mmjax.config.engine_config import (
    SETTING_CLASSES,
    EngineConfig,
    ServerConfig,
    check_together,
    group_fields,
    serve_settings,
)
from mmjax.config.refused_flags import HELD_FLAGS, is_held, refusal_of
from mmjax.config.settings import Setting, nearest_name, settings_of
from mmjax.errors import ConfigError, MMJaxError
from mmjax.models.model_source import DEFAULT_MODEL, load_engine_config, load_generation_defaults
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH", Mapping: "JSON"}
_LIST_METAVARS = {"words": "TEXT", "commas": "TEXT,TEXT", "json": "JSON"}


class Given(NamedTuple):
    """A setting's value, and where it is from."""

    value: Any
    origin: str
    """"default", "flag --port", "file FILE.yaml" or "environment NAME"."""


def parse_flags(
    argv: Sequence[str] | None = None, *, prog: str = "python -m mmjax.serve"
) -> argparse.Namespace:
    """Return every setting by name; exit with a message if one is wrong.

    A flag overrides the `--config` file, which overrides the environment and the default.
    """
    given, must_dump = _read(_build_parser(prog), argv)
    if must_dump:
        print(_dump(given), end="")
        raise SystemExit(0)
    return argparse.Namespace(**{name: one.value for name, one in given.items()})


def parse_mapping(values: Mapping[str, Any]) -> argparse.Namespace:
    """Return every setting by name, from values by name; ConfigError if one is wrong.

    They override the environment and the defaults.
    """
    known = serve_settings()
    given = {name: one.default for name, one in known.items()}
    given |= {name: one.value for name, one in _read_environment(known).items()}
    return argparse.Namespace(**given | _read_values(values, known))


def dump_config(argv: Sequence[str] | None = None, *, prog: str = "mmjax config") -> str:
    """Return every setting with its value and its origin, as a file for `--config`."""
    description = "Print every setting that `mmjax serve` would have, and where it is from."
    return _dump(_read(_build_parser(prog, description), argv)[0])


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print the settings that `mmjax serve` with the same arguments would have."""
    # `--dump` reads well, and is what the command does in any case.
    arguments = [one for one in argv if one not in ("--dump", "--dump-config")]
    print(dump_config(arguments, prog=prog), end="")
    return 0


def _read(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[dict[str, Given], bool]:
    """Return every setting, and whether to print them."""
    arguments = sys.argv[1:] if argv is None else argv
    namespace, unknown = parser.parse_known_args([_with_dashes(one) for one in arguments])
    flags = vars(namespace)
    positional, config_file = flags.pop("positional_model"), flags.pop("config")
    must_dump = flags.pop("dump_config")
    held = {flag: value for flag in HELD_FLAGS if (value := flags.pop(flag)) is not None}
    if positional is not None and "model" in flags:
        parser.error("the model is given twice; give it once, with or without `--model`")
    if positional is not None:
        flags["model"] = positional
    known = serve_settings()
    try:
        for flag, value in held.items():
            if not is_held(flag, value):
                _refuse_unknown(flag, "argument")
        for argument in unknown:
            _refuse_unknown(argument.partition("=")[0], "argument")
        given = {name: Given(one.default, "default") for name, one in known.items()}
        given |= _read_environment(known)
        if config_file is not None:
            given |= _read_config_file(Path(config_file), known)
        for name, value in flags.items():
            one = known[name]
            given[name] = Given(one.parse_any(value, one.flag), f"flag {one.flag}")
    except ConfigError as error:
        parser.error(str(error))
    return given, must_dump


def _with_dashes(argument: str) -> str:
    """Return `--max_num_seqs=8` as `--max-num-seqs=8`; vLLM takes both spellings."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _read_environment(known: Mapping[str, Setting]) -> dict[str, Given]:
    return {
        name: Given(one.parse_text(text, one.environment), f"environment {one.environment}")
        for name, one in known.items()
        if one.environment is not None and (text := os.environ.get(one.environment))
    }


def _dump(given: Mapping[str, Given]) -> str:
    """Return a YAML file; JSON, of which its values are made, is YAML."""
    lines: list[str] = []
    found = _read_checkpoint(given)
    for title, config_class in SETTING_CLASSES.items():
        lines += ["", f"# {title}"] if lines else [f"# {title}"]
        for one in settings_of(config_class):
            value, origin = given[one.name]
            if one.name in found and origin == "default":
                # A comment: in such a file the checkpoint still decides.
                shown = json.dumps(found[one.name], ensure_ascii=False)
                lines.append(f"# {one.name}: {shown}  (the checkpoint's)")
            elif value is None or (one.is_secret and value):
                shown = "not shown" if one.is_secret and value else one.default_text or "none"
                lines.append(f"# {one.name}: {shown}  ({origin})")
            else:
                text = json.dumps(value, default=str, ensure_ascii=False)
                lines.append(f"{one.name}: {text}  # {origin}")
    return "\n".join(lines) + "\n"


def _read_checkpoint(given: Mapping[str, Given]) -> dict[str, Any]:
    """Return what a checkpoint on this machine decides of settings that are left to it."""
    model = given["model"].value
    if model not in (None, DEFAULT_MODEL) and not Path(model).expanduser().is_dir():
        return {}
    try:
        config = load_engine_config({name: one.value for name, one in given.items()}).model
        defaults = load_generation_defaults(config)
    except MMJaxError as error:
        logger.warning("the checkpoint's own settings are not shown: %s", error)
        return {}
    return {
        "max_model_len": config.max_model_len,
        "served_model_name": config.public_name,
        "generation_config": dict(defaults.sampling),
    }


def check_alone(flags: argparse.Namespace) -> None:
    """Raise ConfigError for settings of the engine that are wrong whatever the checkpoint is.

    For a server that starts its engine process before it reads the checkpoint.
    """

    def make(group: str) -> Any:
        return SETTING_CLASSES[group](**group_fields(group, vars(flags)))

    media, cache = make("multimodal"), make("cache")
    check_together(cache, make("scheduler"), make("parallel"), make("lora"), flags.precompile)
    directories = (cache.kv_offload_dir, cache.encoder_cache_dir, media.mm_processor_cache_dir)
    if any(directories):
        # Imported here: what opens them is slow.
        from mmjax.cache.disk_store import check_directory

        for directory in filter(None, directories):
            check_directory(directory)


def to_engine_config(flags: argparse.Namespace) -> EngineConfig:
    """Return P1's configuration, which includes the checkpoint's."""
    return load_engine_config(vars(flags))


def to_server_config(flags: argparse.Namespace) -> ServerConfig:
    """Return the HTTP server's configuration."""
    return SETTING_CLASSES["server"](**group_fields("server", vars(flags)))


def _build_parser(
    prog: str = "python -m mmjax.serve",
    description: str = "Serve a multimodal model over OpenAI's HTTP API.",
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [MODEL] [--config FILE.yaml] [--FLAG VALUE ...]; --help lists all flags",
        description=description,
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
    parser.add_argument(
        "--dump-config",
        action="store_true",
        help="print every setting, its value and where it is from, as such a file; then exit",
    )
    for flag, values in HELD_FLAGS.items():
        options: dict[str, Any] = (
            {"nargs": "?", "const": ""} if values else {"action": "store_true"}
        )
        parser.add_argument(flag, dest=flag, default=None, help=argparse.SUPPRESS, **options)
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


def _read_config_file(path: Path, known: Mapping[str, Setting]) -> dict[str, Given]:
    try:
        values = _read_values(_read_yaml(path), known)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return {name: Given(value, f"file {path}") for name, value in values.items()}


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file's mapping; a repeated key is an error."""
    # Imported here: the engine process imports this module, too, and reads no file.
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, which would silently take the last of repeated keys."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    again = f"`{key.value}` is given twice; give it once"
                    raise yaml.constructor.ConstructorError(None, None, again, key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep=deep)

    try:
        content = yaml.load(path.expanduser().read_text(encoding="utf-8"), Loader=Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file cannot be read ({error}); give a file of YAML") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"the file holds {type(content).__name__}; expected a mapping, as `max-num-seqs: 8`"
        )
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r} is no name; expected names, as `max-num-seqs: 8`")
    return content


def _read_values(values: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return parsed values by the settings' names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            if is_held(f"--{name.replace('_', '-')}", value):
                continue
            _refuse_unknown(key, "setting")
        if name in found:
            raise ConfigError(f"`{key}` is given twice; give it once")
        found[name] = known[name].parse_any(value, key)
    return found


def _refuse_unknown(written: str, kind: Literal["argument", "setting"]) -> None:
    """Raise ConfigError for an unknown argument or key."""
    is_setting = kind == "setting"
    flag = f"--{written.replace('_', '-')}" if is_setting else written
    reason = refusal_of(flag)
    if reason is not None:
        raise ConfigError(f"`{written}` is a flag of vLLM's that mmjax does not take: {reason}")
    settings = serve_settings()
    known = settings if is_setting else {one.flag: one for one in settings.values()}
    if is_setting:
        nearest = nearest_name(written.replace("-", "_"), known)
    else:
        nearest = nearest_name(written, known, page="`--help`")
    raise ConfigError(f"unknown {kind} `{written}`; {nearest}")
