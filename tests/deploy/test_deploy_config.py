"""How a deployment's settings are given, and that the examples give them so. Needs no Ray."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmjax.deploy.config import deploy_settings, read_deployment
from mmjax.errors import ConfigError
from mmjax.server.flags import to_server_config

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples" / "ray_serve").glob("*.yaml"))


def test_texts_of_a_command_line_and_values_of_a_file_are_the_same() -> None:
    typed = read_deployment({"mode": "front", "num-replicas": "2", "max-num-seqs": "4"})
    filed = read_deployment({"mode": "front", "num_replicas": 2, "max_num_seqs": 4})
    assert typed == filed
    assert (typed.config.most_replicas, typed.server.max_num_seqs) == (2, 4)


@pytest.mark.parametrize("is_text", [False, True])
def test_names_of_the_model_and_flags_of_vllm(is_text: bool) -> None:
    given = {"enable-request-id-headers": "true" if is_text else True, "data_parallel_size": "1"}
    named = {"served-model-name": "a" if is_text else ["a", "b"]}
    server = read_deployment({**given, **named}).server
    assert server.served_model_name == (("a",) if is_text else ("a", "b"))
    with pytest.raises(ConfigError, match="only `1` is taken"):
        read_deployment({"data_parallel_size": "2"})


def test_what_is_not_given_has_its_default() -> None:
    deployment = read_deployment({})
    assert deployment.config.mode == "header"
    assert not deployment.config.is_scaling
    assert to_server_config(deployment.server).port == 8000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"mode": "sideways"}, "`mode` is 'sideways'; expected one of header, front"),
        ({"num_replicas": 0}, "`num_replicas` is 0; expected an integer of at least 1"),
        ({"num_replicas": "two"}, "`num_replicas` is 'two'"),
        ({"min_replicas": 1}, "`max_replicas` is missing"),
        ({"min_replicas": 3, "max_replicas": 2}, "`min_replicas` is 3, more than"),
        ({"port": 8001}, "`port` is no setting of a replica: Ray's proxy has it"),
        ({"distributed_coordinator": "a:1"}, "each replica finds its own"),
        ({"distributed_process_id": 1}, "give `distributed_num_processes`"),
        ({"distributed_num_processes": 2}, "which 2 processes cannot share evenly"),
        ({"allow_runtime_lora_updating": True}, "unknown to the others; give `lora_modules`"),
        ({"max_num_seq": 4}, "do you mean `max_num_seqs`?"),
        ({"max_num_seqs": 0}, "`max_num_seqs` is 0"),
        ({"max_num_seqs": 1, "max-num-seqs": 2}, "given twice"),
        ({"target_num_waiting": 0}, "`target_num_waiting` is 0"),
    ],
)
def test_a_wrong_setting_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_deployment(args)
    assert message in str(caught.value)


def test_a_key_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMJAX_API_KEY", "secret")
    assert to_server_config(read_deployment({}).server).api_keys == ("secret",)


def test_there_is_an_example_for_each_mode() -> None:
    assert [file.stem for file in EXAMPLES] == ["front", "header"]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_as_it_should_be(file: Path) -> None:
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    (application,) = config["applications"]
    assert read_deployment(application["args"]).config.mode == file.stem
    module, _, name = application["import_path"].partition(":")
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
    assert name in {
        node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
    }
    assert config["http_options"]["host"] == "127.0.0.1", "nothing is open to others by default"
    assert re.search(r"serve deploy (\S+)", file.read_text(encoding="utf-8"))


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert [name for name in deploy_settings() if f"`{name}`" not in page] == []
