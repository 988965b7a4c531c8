"""Read a YAML file that is one mapping; a repeated key is an error."""

from pathlib import Path
from typing import Any

import yaml

from mmjax.errors import ConfigError


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Return a file's mapping; ConfigError if it cannot be read or is none."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        content = yaml.load(text, Loader=_Loader)
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


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which would silently take the last of repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{key.value}` is given twice; give it once", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)
