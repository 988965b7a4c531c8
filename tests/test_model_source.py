"""Checkpoints are found, read, and named when they cannot be."""

import errno
import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from huggingface_hub import set_client_factory
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils._http import default_client_factory
from safetensors.numpy import save

from mmjax.errors import CheckpointError, ConfigError
from mmjax.models.model_source import (
    load_engine_config,
    load_generation_defaults,
    load_model_config,
    resolve_adapter,
    resolve_model,
)
from tests.families import internvl, mistral3
from tests.families.directories import edit_json


@pytest.fixture
def copy_of(tiny_gemma3: Path, tmp_path: Path) -> Path:
    """The checkpoint without its weights, to be changed."""
    target = tmp_path / "model"
    shutil.copytree(tiny_gemma3, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_directory(tiny_gemma3: Path) -> None:
    config = load_model_config(str(tiny_gemma3))
    assert config.path == tiny_gemma3
    assert config.architecture == "Gemma3ForConditionalGeneration"
    assert config.max_model_len == 4096
    assert config.public_name == str(tiny_gemma3)
    assert load_model_config(str(tiny_gemma3), served_model_name="x").public_name == "x"


def test_the_length_is_capped_and_checked(copy_of: Path) -> None:
    raw = json.loads((copy_of / "config.json").read_text())
    raw["text_config"]["max_position_embeddings"] = 131072
    (copy_of / "config.json").write_text(json.dumps(raw))
    assert load_model_config(str(copy_of)).max_model_len == 8192
    assert load_model_config(str(copy_of), max_model_len=100_000).max_model_len == 100_000
    with pytest.raises(ConfigError, match="131072"):
        load_model_config(str(copy_of), max_model_len=131073)


def test_the_default_is_found_in_a_wheel_and_in_a_checkout(
    tiny_gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mmjax"
    monkeypatch.setattr("importlib.resources.files", lambda name: package)
    monkeypatch.setattr("mmjax.models.model_source.__file__", str(package / "model_source.py"))
    with pytest.raises(CheckpointError, match="tiny_scenes"):
        resolve_model(None)
    checkout = tmp_path / "checkpoints" / "tiny_scenes" / "model"
    checkout.mkdir(parents=True)
    (checkout / "config.json").touch()
    assert resolve_model(None) == checkout
    packaged = package / "_checkpoints" / "tiny_scenes"
    packaged.mkdir(parents=True)
    (packaged / "config.json").touch()
    assert resolve_model(None) == packaged
    with pytest.raises(CheckpointError, match="tiny_scenes"):
        resolve_adapter("tiny_scenes/italian")
    for folder in (checkout.parent, packaged):
        adapter = folder / "adapters" / "italian"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").touch()
        assert resolve_adapter("tiny_scenes/italian") == adapter


def test_the_defaults_name(monkeypatch: pytest.MonkeyPatch, tiny_gemma3: Path) -> None:
    monkeypatch.setattr("mmjax.models.model_source._embedded_default", lambda: tiny_gemma3)
    assert load_model_config(None).public_name == "tiny_scenes"


def test_the_default_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny_scenes") == resolve_model(None)
    (tmp_path / "tiny_scenes").mkdir()
    assert resolve_model("tiny_scenes") == Path("tiny_scenes"), "a directory of that name is meant"


@pytest.mark.parametrize("model", ["./missing", "/missing/model", "~/missing", "a/b/c", ""])
def test_missing_directories(model: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model(model)


def test_the_hub_is_asked_without_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/name", revision="v1") == tmp_path
    assert (asked["name"], asked["revision"]) == ("owner/name", "v1")
    patterns = asked["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not {"*", "*.bin", "*.pt", "*.py", "*.pkl"} & set(patterns)


@pytest.mark.parametrize(
    ("wanted", "copies"),
    [
        # mistralai/Mistral-Small-3.1-24B-Instruct-2503, and Voxtral's
        (
            ["model-00001-of-00010.safetensors", "model.safetensors.index.json", "tekken.json"],
            ["consolidated.safetensors"],
        ),
        # openai/whisper-large-v3
        (
            ["model.safetensors", "generation_config.json", "vocab.json"],
            [f"model.fp32-0000{number}-of-00002.safetensors" for number in (1, 2)],
        ),
    ],
)
def test_copies_of_the_weights_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[str], copies: list[str]
) -> None:
    found: list[str] = []

    def download(name: str, *, allow_patterns: Any, ignore_patterns: Any = None, **_: Any) -> str:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        found.extend(filter_repo_objects([*wanted, *copies], **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_model("owner/name")
    assert found == wanted


LICENCE = r"is gated: accept its licence at https://huggingface.co/owner/name.*HF_TOKEN"


def refused(status: int, **headers: str) -> httpx2.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.Response(status, headers=names, json={"error": "no"})


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (refused(401, X_Error_Code="GatedRepo"), LICENCE),
        (refused(403, X_Error_Code="GatedRepo"), LICENCE),
        (refused(401), "no model `owner/name`: check the name; .* private or gated: .*HF_TOKEN"),
        (refused(404, X_Error_Code="RepoNotFound"), "no model `owner/name`"),
        (
            refused(401, X_Error_Message="Invalid credentials in Authorization header"),
            r"refused the token that it got with `owner/name` \(401\): .*HF_TOKEN",
        ),
        (refused(403, X_Error_Message="Please enable access"), r"\(403\): .*HF_TOKEN"),
        (refused(404, X_Error_Code="RevisionNotFound"), "no revision `v1`"),
        (refused(500), r"did not give it \(HfHubHTTPError\); .*hf download owner/name"),
        (httpx2.ConnectError("no"), r"did not give it \(ConnectError\); check the network"),
        (httpx2.ProxyError("no"), r"did not give it \(ProxyError\); check the network"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(
    answer: httpx2.Response | Exception,
    match: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(request: httpx2.Request) -> httpx2.Response:
        # A gated model's name is public, its files are not.
        if (
            "GatedRepo" in getattr(answer, "headers", {}).values()
            and "/tree/" not in request.url.path
        ):
            return httpx2.Response(200, json={"id": "owner/name", "sha": "0" * 40, "siblings": []})
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(ask)))
    try:
        with pytest.raises(CheckpointError, match=match):
            resolve_model("owner/name", revision="v1", download_dir=tmp_path)
    finally:
        set_client_factory(default_client_factory)


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        resolve_model("owner/name")


def test_what_no_cache_has_is_named_offline() -> None:
    # The tests are offline: nothing is found, and nothing is asked.
    with pytest.raises(CheckpointError, match=r"owner/no-such-model.*HF_HUB_OFFLINE forbids"):
        resolve_model("owner/no-such-model")
    with pytest.raises(CheckpointError, match="`no such` is neither a directory nor a hub id"):
        resolve_model("no such")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "no config.json"),
        ("{", "not valid JSON"),
        ("[]", "must hold an object"),
        ('{"model_type": "no_such_type"}', "no_such_type"),
        ('{"model_type": "molmo2", "vision_config": {"image_size": 378}}', "'image_size' expected"),
        ('{"model_type": "llava", "text_config": 5}', "could not build"),
        ('{"model_type": "gemma3"}', "architectures"),
    ],
)
def test_bad_configurations(content: str | None, match: str, copy_of: Path) -> None:
    file = copy_of / "config.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(CheckpointError, match=match):
        load_model_config(str(copy_of))


def test_quantized_weights_are_refused_by_their_key(copy_of: Path) -> None:
    rewrite(copy_of / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    (copy_of / "model.safetensors").write_bytes(save({}))
    assert load_model_config(str(copy_of)).architecture  # prompts can be processed
    refusal = r"`quantization_config.quant_method` .* is `bitsandbytes`.* `--quantization int4`"
    with pytest.raises(CheckpointError, match=refusal):
        load_engine_config({"model": str(copy_of)})


def test_a_quantized_decoder_is_refused_too(tmp_path: Path) -> None:
    path = internvl.write_gpt_oss(tmp_path)
    text = json.loads((path / "config.json").read_text())["text_config"]
    quantized = {**text, "quantization_config": {"quant_method": "mxfp4"}}
    rewrite(path / "config.json", text_config=quantized)
    (path / "model.safetensors").write_bytes(save({}))
    with pytest.raises(CheckpointError, match=r"`quantization_config.quant_method` .* is `mxfp4`"):
        load_engine_config({"model": str(path)})


def test_quantized_weights_are_not_quantized_again(copy_of: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4}
    rewrite(copy_of / "config.json", quantization_config=settings)
    (copy_of / "model.safetensors").write_bytes(save({}))
    with pytest.raises(CheckpointError, match=r"`quantization` is int8, but .*`awq`\); leave it"):
        load_engine_config({"model": str(copy_of), "quantization": "int8"})


@pytest.mark.parametrize("has_head", [False, True])
def test_files_say_whether_a_head_is_tied_where_the_configuration_does_not(
    tmp_path: Path, has_head: bool
) -> None:
    path = mistral3.write_files("ministral3", tmp_path)
    edit_json(path / "config.json", {"tie_word_embeddings": None})
    assert load_model_config(str(path)).hf_config.tie_word_embeddings
    names = ["model.norm.weight", *(["lm_head.weight"] * has_head)]
    (path / "model.safetensors").write_bytes(save({name: np.zeros(2) for name in names}))
    assert load_model_config(str(path)).hf_config.tie_word_embeddings is not has_head


def test_devices_that_cannot_share_the_heads_are_refused(copy_of: Path) -> None:
    (copy_of / "model.safetensors").write_bytes(save({}))
    with pytest.raises(ConfigError, match=r"is 3, but the language model has \d+ attention heads"):
        load_engine_config({"model": str(copy_of), "tensor_parallel_size": 3})


def test_weights_are_checked_where_they_are_needed(copy_of: Path) -> None:
    assert load_model_config(str(copy_of)).architecture  # prompts can be processed
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_engine_config({"model": str(copy_of)})


def test_a_layout_that_transformers_does_not_know(tmp_path: Path) -> None:
    """InternVL's own: its language model lies in `llm_config`, its tower is of no known type."""
    language = {"model_type": "qwen2", "vocab_size": 100, "max_position_embeddings": 50}
    raw = {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "model_type": "internvl_chat",
        "llm_config": language,
        "vision_config": {"model_type": "intern_vit_6b", "patch_size": 14},
        "downsample_ratio": 0.5,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(str(tmp_path))
    assert (config.architecture, config.max_model_len) == ("InternVLChatModel", 50)
    for hf_config in (config.hf_config, deepcopy(config).hf_config):
        assert hf_config.get_text_config().vocab_size == 100
        assert hf_config.llm_config.model_type == "qwen2"
        assert hf_config.llm_config.hidden_size > 0  # what config.json leaves out
        assert hf_config.vision_config.patch_size == 14
        assert (hf_config.model_type, hf_config.downsample_ratio) == ("internvl_chat", 0.5)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "llm_config": None}))
    with pytest.raises(CheckpointError, match=r"internvl_chat.*llm_config"):
        load_model_config(str(tmp_path))


def test_generation_defaults(copy_of: Path) -> None:
    file = copy_of / "generation_config.json"
    rewrite(file, temperature=0.5, top_k=64, top_p=0.95, do_sample=True, eos_token_id=[1, -1, 106])
    rewrite(file, no_repeat_ngram_size=3, suppress_tokens=[8, 3, 10**6])
    config = load_model_config(str(copy_of))
    defaults = load_generation_defaults(config)
    assert defaults.sampling == {
        "temperature": 0.5,
        "top_k": 64,
        "top_p": 0.95,
        "no_repeat_ngram_size": 3,
    }
    assert defaults.eos_token_ids == (1, 106)
    assert defaults.banned_token_ids == ((3,), (8,))
    rewrite(file, bad_words_ids=[[8], [5, 6], [106], [], [7, 10**6]])
    assert load_generation_defaults(config).banned_token_ids == ((3,), (5, 6), (8,))
    rewrite(file, top_p=0)
    with pytest.raises(
        CheckpointError, match=r"of generation_config.json .*: `top_p` is 0; it mus"
    ):
        load_generation_defaults(config)
    file.write_text("{")
    with pytest.raises(CheckpointError, match="generation_config"):
        load_generation_defaults(config)
    file.unlink()
    assert load_generation_defaults(config).sampling == {}
    assert load_generation_defaults(config).eos_token_ids == (1,)


def test_generation_defaults_are_chosen_and_replaced(copy_of: Path, tmp_path: Path) -> None:
    def sampling(**fields: Any) -> Any:
        return load_generation_defaults(load_model_config(str(copy_of), **fields)).sampling

    rewrite(copy_of / "generation_config.json", temperature=0.5, top_k=64)
    assert sampling()["temperature"] == 0.5
    assert sampling(generation_config="vllm") == {}
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.25}')
    assert sampling(generation_config=str(other)) == {"top_p": 0.25}
    overrides = {"top_p": 0.75, "top_k": 3}
    assert sampling(generation_config=str(other), override_generation_config=overrides) == overrides


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"generation_config": "/no/such"}, "which has no generation_config.json"),
        ({"override_generation_config": {"colour": 1}}, "sets `colour`; it may set `temperature`"),
        ({"override_generation_config": {"top_k": "x"}}, "gives 'x' as `top_k`; expected a number"),
        ({"override_generation_config": {"top_k": True}}, "gives True as `top_k`"),
    ],
)
def test_wrong_generation_defaults_are_named(
    copy_of: Path, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        load_generation_defaults(load_model_config(str(copy_of), **fields))


def test_the_hubs_checkpoints_are_kept_where_one_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def download(model: str, **options: Any) -> str:
        calls.append(options["cache_dir"])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_model("owner/name", download_dir=tmp_path / "d")
    resolve_model("owner/name")
    assert calls == [tmp_path / "d", None]
