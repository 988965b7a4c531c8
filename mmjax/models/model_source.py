"""Find a checkpoint (the embedded default, a directory, the hub) and read its configuration.

Reads no tensors, but checks that their files are whole. Independent of the supported architectures.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from mmjax.config.engine_config import (
    SETTING_CLASSES,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    group_fields,
)
from mmjax.errors import CheckpointError, ConfigError, MMJaxError, RequestError
from mmjax.models.original_config import (
    DEEPSEEK_OCR,
    DEEPSEEK_OCR2,
    SPECULATORS_KIND,
    UNLIMITED_OCR,
    build_deepseek_ocr_config,
    build_speculator_config,
)
from mmjax.params.sampling_params import SamplingParams

DEFAULT_MODEL = "tiny_scenes"
"""The checkpoint that is part of mmjax."""
DEFAULT_ADAPTERS = {f"{DEFAULT_MODEL}/italian": "italian"}
"""Its adapters -> their directories beside it."""

DEFAULT_MAX_MODEL_LEN = 8192
"""Cap of the default `max_model_len`, which bounds the KV cache's size."""

_BY_PART: Mapping[tuple[str, Any], str] = {
    ("Blip2ForConditionalGeneration", "t5"): "Blip2T5ForConditionalGeneration",
    ("KimiK25ForConditionalGeneration", "kimi_k25_vision"): "Kimi_K25ForConditionalGeneration",
    ("LlavaForConditionalGeneration", "pixtral"): "PixtralForConditionalGeneration",
}
"""Families that checkpoints name by the wrapper around them, or as their own code does, by that and
the `model_type` of the vision tower or of the language model."""
_GENERATION_CONFIG = "generation_config.json"
_GENERATION_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "no_repeat_ngram_window_size",
)
"""Fields of SamplingParams that it may set."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
CONFIG_FILES = ("*.json", "*.jinja", "*.model", "tokenizer*", "*.txt", "*.tiktoken")
"""Files without weights."""
CHECKPOINT_FILES = (*WEIGHT_FILES, *CONFIG_FILES)
"""Files to download from the hub: no pickles (`*.bin`, `*.pt`), no code."""
COPIES = ("consolidated*.safetensors", "*.fp32-*.safetensors")
"""Weight files that are not read: the same weights in Mistral's own layout, and Whisper's in
float32, which are published beside those that are."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The same, of an adapter."""

_LANGUAGE_PARTS = {
    "deepseek_vl_v2": "language_config",
    "internvl_chat": "llm_config",
    "molmo": None,
    "qwen": None,
    "ultravox": "text_config",
}
"""Model types unknown to transformers -> the key of their language model in config.json; None: its
keys stand beside the others."""

_PARTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "ultravox": {
        "text_model_id": ("text_config", "language_model."),
        "audio_model_id": ("audio_config", "audio_tower."),
    }
}
"""Model types whose config.json may name, by these keys, checkpoints that they were trained from ->
where one's own config.json belongs in it, and what its tensors' names begin with."""

_SAME_AS: Mapping[str, tuple[str, Mapping[str, tuple[str, Any]]]] = {
    "davit": (
        "florence_vision",
        {
            "embed_dim": ("dim_embed", None),
            "max_position_embeddings": ("image_pos_embed.max_pos_embeddings", 50),
            "max_temporal_embeddings": ("visual_temporal_embedding.max_temporal_embeddings", 100),
        },
    ),
    "florence2_language": ("bart", {}),
    "internlm2": ("llama", {"attention_bias": ("bias", True)}),
}
"""Model types that transformers does not know -> one that computes the same; of its keys, those
that have another name there (`a.b`: key `b` of `a`), and what they are where they are left out."""

_FIRST_LONGROPE = "su"
"""What Phi-3's first files call `longrope`. Transformers knows the name, but finds the trained
length of the new one alone."""

_TIED_WITHOUT_KEY = frozenset({"kimi_k25", "mistral3", "paddleocr_vl", "t5"})
"""Model types, or those of a text model, whose class in transformers ties the head of published
configurations that do not say so; their files tell."""

_THINKERS = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Model types whose configuration holds several models' -> the one that reads and writes text."""

_AS_WRITTEN = frozenset({"deepseek_v2"})
"""Model types whose class in transformers refuses configurations that are published."""


def resolve_model(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: Path | None = None,
    needs_weights: bool = True,
) -> Path:
    """Return the local directory of `model`: a directory, a hub id, or the embedded default.

    The default is None, or its name where no directory has that. `download_dir`: where the hub's
    checkpoints are kept; None: in Hugging Face's cache. Without `needs_weights` the other files
    alone are downloaded.
    """
    if model is None:
        return _embedded_default()
    path = Path(model).expanduser()
    if model.strip() and path.is_dir():
        return path
    if model == DEFAULT_MODEL:
        return _embedded_default()
    if _looks_like_path(model):
        raise CheckpointError(
            f"model directory `{model}` does not exist; give a directory that holds config.json, "
            "or a hub id such as google/gemma-3-4b-it"
        )
    files = CHECKPOINT_FILES if needs_weights else CONFIG_FILES
    return _download(model, revision, download_dir, files)


def resolve_adapter(adapter: str, *, download_dir: Path | None = None) -> Path:
    """Return the local directory of an adapter: one of the default's, a directory, or a hub id."""
    path = Path(adapter).expanduser()
    if adapter.strip() and path.is_dir():
        if not (path / ADAPTER_FILES[0]).is_file():
            raise CheckpointError(
                f"the adapter's directory `{adapter}` has no {ADAPTER_FILES[0]}; give one that "
                "PEFT wrote"
            )
        return path.resolve()
    if adapter in DEFAULT_ADAPTERS:
        folder = f"adapters/{DEFAULT_ADAPTERS[adapter]}"
        return _find_embedded(folder, folder, ADAPTER_FILES[0])
    if _looks_like_path(adapter):
        raise CheckpointError(
            f"the adapter's directory `{adapter}` does not exist; give one that holds "
            f"{ADAPTER_FILES[0]}, or a hub id"
        )
    return _download(adapter, None, download_dir, ADAPTER_FILES)


def load_model_config(
    model: str | None,
    *,
    revision: str | None = None,
    max_model_len: int | None = None,
    download_dir: Path | None = None,
    needs_weights: bool = False,
    served_model_name: str | Sequence[str] = (),
    **fields: Any,
) -> ModelConfig:
    """Read the checkpoint's config.json into a ModelConfig.

    Args:
        model: As in `resolve_model`.
        revision: Of a hub id.
        max_model_len: None: the checkpoint's, at most `DEFAULT_MAX_MODEL_LEN`.
        download_dir: As in `resolve_model`.
        needs_weights: Whether to download the weights, and to check their files first, which takes
            milliseconds.
        served_model_name: One or several.
        fields: Other settings of ModelConfig, and `mm`.
    """

    def find(model: str | None, revision: str | None = None) -> Path:
        path = resolve_model(
            model, revision=revision, download_dir=download_dir, needs_weights=needs_weights
        )
        if needs_weights:
            # Imported here: numpy is slow, and P1 needs neither at its start.
            from mmjax.weights.files.safetensors import check_weight_files

            check_weight_files(path)
        return path

    path = find(model, revision)
    if needs_weights:
        from mmjax.weights.files.safetensors import is_snapshot

        # It has the tensors of its parts, too.
        needs_weights = not is_snapshot(path)
    raw = _read_config(path)
    parts = _find_parts(raw, find)
    hf_config = _load_hf_config(path, _join_parts(raw, parts))
    if any(path.glob(WEIGHT_FILES[0])):
        for part in (hf_config, hf_config.get_text_config()):
            if part.model_type in _TIED_WITHOUT_KEY:
                _untie_own_head(part, path)
    longest = _max_position_embeddings(hf_config)
    if max_model_len is None:
        max_model_len = min(longest or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
    elif longest is not None and max_model_len > longest:
        raise ConfigError(
            f"`max_model_len` is {max_model_len}, but the checkpoint knows {longest} positions; "
            f"give at most {longest}"
        )
    names = (served_model_name,) if isinstance(served_model_name, str) else served_model_name
    return SETTING_CLASSES["model"](
        served_model_name=tuple(names),
        model=model or DEFAULT_MODEL,
        path=path,
        hf_config=hf_config,
        architecture=_architecture(hf_config),
        parts=parts,
        max_model_len=max_model_len,
        revision=revision,
        download_dir=download_dir,
        **fields,
    )


def load_engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's configuration, which includes the checkpoint's; its weights are there.

    Args:
        values: Parsed settings by name, also of other groups; default: each setting's.

    CheckpointError where weights are quantized, missing or cut short; none are needed for dummy
    ones.
    """

    def make(group: str, **more: Any) -> Any:
        return SETTING_CLASSES[group](**group_fields(group, values), **more)

    media = make("multimodal")
    named: dict[str, Any] = {"model": None, **group_fields("model", values), "mm": media}
    parts = {group: make(group) for group in ("cache", "scheduler", "parallel", "lora")}
    model = load_model_config(**named, needs_weights=named.get("load_format") != "dummy")
    check_quantization(model)
    if parts["parallel"].tensor_parallel_size > 1:
        parts["parallel"].check_heads(model.hf_config.get_text_config().num_attention_heads)
    # Local directories, for a process that reads no hub.
    adapters = [
        f"{name}={resolve_adapter(path, download_dir=model.download_dir)}"
        for name, path in parts["lora"].modules
    ]
    parts["lora"] = replace(parts["lora"], lora_modules=tuple(adapters))
    return make("engine", model=model, draft=_load_draft(model, parts["scheduler"]), **parts)


def _load_draft(model: ModelConfig, scheduler: SchedulerConfig) -> ModelConfig | None:
    """Return the configuration of the model that guesses for another; None: none does."""
    speculation = scheduler.speculation
    if speculation is None or speculation.model is None:
        return None
    draft = load_model_config(
        speculation.model,
        revision=speculation.revision,
        download_dir=model.download_dir,
        dtype=model.dtype,
        load_format=model.load_format,
        quantization=model.quantization,
        mm=model.mm,
        needs_weights=model.load_format != "dummy",
    )
    check_quantization(draft)
    # It guesses, for better or worse, behind the positions that it was trained for, too.
    return replace(draft, max_model_len=model.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The checkpoint's defaults of sampling, its EOS tokens, and what it never answers."""

    sampling: Mapping[str, Any]
    """Fields of SamplingParams that the generation config sets."""
    eos_token_ids: tuple[int, ...]
    banned_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that no answer has: each of `suppress_tokens`, as the ends of media of
    Gemma 4's 12B, and `bad_words_ids`, as the placeholders of pictures of Idefics3's 8B."""


def load_generation_defaults(model_config: ModelConfig) -> GenerationDefaults:
    """Read generation_config.json, which may be absent, and the EOS tokens of config.json."""
    raw = read_generation_config(model_config.path)
    settings = {**_chosen_generation_config(model_config, raw), **_overrides(model_config)}
    sampling = {
        name: settings[name]
        for name in _GENERATION_FIELDS
        if isinstance(settings.get(name), int | float)
    }
    try:
        SamplingParams(**sampling)
    except RequestError as error:
        raise CheckpointError(
            f"a default of sampling, of {_GENERATION_CONFIG} or `override_generation_config`: "
            f"{error}"
        ) from error
    text_config = model_config.hf_config.get_text_config()
    found: list[int] = []
    for value in (
        raw.get("eos_token_id"),
        getattr(model_config.hf_config, "eos_token_id", None),
        getattr(text_config, "eos_token_id", None),
    ):
        ids = value if isinstance(value, list) else [value] if isinstance(value, int) else []
        found += [one for one in ids if one >= 0]  # -1: none
    # A bad word that is an end alone is none, as in HF.
    words = [one for one in raw.get("bad_words_ids") or () if one not in [[end] for end in found]]
    words += [[one] for one in raw.get("suppress_tokens") or ()]
    known = {*range(text_config.vocab_size)}
    # Those beyond the vocabulary have no logit: HF's processor passes them over, too.
    banned = {tuple(word) for word in words if word and known.issuperset(word)}
    return GenerationDefaults(
        sampling=sampling,
        eos_token_ids=tuple(dict.fromkeys(found)),
        banned_token_ids=tuple(sorted(banned)),
    )


def _chosen_generation_config(
    model_config: ModelConfig, own: Mapping[str, Any]
) -> Mapping[str, Any]:
    match model_config.generation_config:
        case "auto":
            return own
        case "vllm":
            return {}
        case directory:
            path = Path(directory).expanduser()
            if not (path / _GENERATION_CONFIG).is_file():
                raise ConfigError(
                    f"`generation_config` is {directory!r}, which has no "
                    f"{_GENERATION_CONFIG}; give one, or auto, or vllm"
                )
            return read_generation_config(path)


def _overrides(model_config: ModelConfig) -> Mapping[str, Any]:
    overrides = model_config.override_generation_config
    for name, value in overrides.items():
        if name not in _GENERATION_FIELDS:
            known = ", ".join(f"`{one}`" for one in _GENERATION_FIELDS)
            raise ConfigError(f"`override_generation_config` sets `{name}`; it may set {known}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"`override_generation_config` gives {value!r} as `{name}`; expected a number"
            )
    return overrides


def read_generation_config(path: Path) -> dict[str, Any]:
    """Return the object of a checkpoint's generation_config.json; empty where there is none."""
    file = path / _GENERATION_CONFIG
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{_GENERATION_CONFIG} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{_GENERATION_CONFIG} holds {type(raw).__name__}, not an object")
    return raw


def _embedded_default() -> Path:
    return _find_embedded("", "model", "config.json")


def _find_embedded(packaged: str, checkout: str, file: str) -> Path:
    """Return a directory of the default: of an installation, or of a checkout."""
    package = Path(str(resources.files("mmjax"))).resolve()
    installed = package / "_checkpoints" / DEFAULT_MODEL / packaged
    for path in (installed, package.parent / "checkpoints" / DEFAULT_MODEL / checkout):
        if (path / file).is_file():
            return path
    raise CheckpointError(
        f"the embedded checkpoint `{DEFAULT_MODEL}` is missing from this installation; "
        "install mmjax again, or name a directory"
    )


def _looks_like_path(model: str) -> bool:
    # A hub id is `name` or `owner/name`; anything else is a directory.
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or not model.strip()


def _download(
    model: str, revision: str | None, download_dir: Path | None, files: Sequence[str]
) -> Path:
    # Imported here: slow, and not needed for a local checkpoint.
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(files),
                ignore_patterns=list(COPIES),
            )
        )
    except (HTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(_explain_hub_error(model, revision, error)) from error


def _explain_hub_error(model: str, revision: str | None, error: BaseException) -> str:
    """Say why the hub did not give a repository, and what to do."""
    # What it finds in no cache either, the hub's client raises from what it got from the hub.
    first = error.__cause__ or error
    known = [_explain_hub_cause(model, revision, cause) for cause in (error, first)]
    if any(known):
        return next(filter(None, known))
    reason = getattr(first, "strerror", None) or type(first).__name__
    return (
        f"`{model}` is not a directory, and the hub did not give it ({reason}); check the network "
        f"and the disk, or download it elsewhere (`hf download {model} --local-dir DIR`), and give "
        "the directory"
    )


def _explain_hub_cause(model: str, revision: str | None, cause: BaseException) -> str | None:
    from huggingface_hub import errors

    page, tokens = f"https://huggingface.co/{model}", "https://huggingface.co/settings/tokens"
    status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
    match cause:
        case errors.GatedRepoError():
            return (
                f"`{model}` is gated: accept its licence at {page}, make a token that may read "
                f"gated repositories at {tokens}, and give it as the environment's HF_TOKEN"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"the hub shows no model `{model}`: check the name; if {page} shows one when you "
                f"are logged in, it is private or gated: make a token at {tokens}, and give it as "
                "the environment's HF_TOKEN"
            )
        case errors.RevisionNotFoundError():
            return f"`{model}` has no revision `{revision}`; {page}/tree/main lists them"
        case errors.HFValidationError():
            return f"`{model}` is neither a directory nor a hub id such as google/gemma-3-4b-it"
        case errors.OfflineModeIsEnabled():
            return (
                f"`{model}` is neither a directory nor in the cache, and HF_HUB_OFFLINE forbids to "
                f"ask the hub; download it elsewhere (`hf download {model} --local-dir DIR`), and "
                "give the directory"
            )
        case _ if status in (401, 403):
            return (
                f"the hub refused the token that it got with `{model}` ({status}): give one as the "
                f"environment's HF_TOKEN that may read gated repositories; {tokens} makes them"
            )
    return None


def _find_parts(raw: Mapping[str, Any], find: Callable[[str], Path]) -> dict[str, Path]:
    """Return the directories of the checkpoints that config.json names, as `ModelConfig.parts`."""
    found: dict[str, Path] = {}
    for key, (_, prefix) in _list_parts(raw).items():
        model = raw.get(key)
        if model is None:
            continue
        if not isinstance(model, str):
            raise CheckpointError(f"`{key}` of config.json is {model!r}; expected a hub id")
        try:
            found[prefix] = find(model)
        except CheckpointError as error:
            raise CheckpointError(
                f"`{key}` of config.json names `{model}`, which has what is not in the "
                f"checkpoint's own files: {error}"
            ) from error
    return found


def _list_parts(raw: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
    model_type = raw.get("model_type")
    return _PARTS.get(model_type, {}) if isinstance(model_type, str) else {}


def _join_parts(raw: dict[str, Any], parts: Mapping[str, Path]) -> dict[str, Any]:
    """Return config.json with those of its parts where they belong."""
    joined = dict(raw)
    for name, prefix in _list_parts(raw).values():
        if prefix in parts:
            joined[name] = _read_config(parts[prefix])
            if "quantization_config" in joined[name]:
                raise CheckpointError(
                    f"`{parts[prefix]}`, which config.json names for its `{name}`, is quantised; "
                    "name the checkpoint that it was made of"
                )
    return joined


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"model directory `{path}` has no config.json; is it the directory of a checkpoint?"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"`{file}` is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"`{file}` must hold an object, not {type(raw).__name__}")
    return raw


def _load_hf_config(path: Path, raw: dict[str, Any]) -> Any:
    """Return the configuration of a directory; `raw`: its config.json, with that of its parts."""
    # Imported here: slow, and not needed for errors above.
    from transformers import AutoConfig

    try:
        originals = ([DEEPSEEK_OCR2], [DEEPSEEK_OCR], [UNLIMITED_OCR])
        # What transformers wrote has the keys of its own class.
        if raw.get("architectures") in originals and "language_config" in raw:
            return build_deepseek_ocr_config(raw)
        if SPECULATORS_KIND in raw:
            return build_speculator_config(raw)
        if raw.get("model_type") in _LANGUAGE_PARTS:
            return _build_hf_config(raw)
        vision = raw.get("vision_config")
        if isinstance(vision, dict) and vision.get("model_type") == "davit":
            return _build_florence2_config(raw, path)
        found = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        parts = dict.fromkeys(_THINKERS, _take_thinker)
        parts |= {"colpali": _take_vlm, "colqwen2": _take_vlm}
        taken = parts.get(found.model_type, lambda whole: whole)(found)
        if (published := getattr(found, "quantization_config", None)) is not None:
            # Quantisers write it beside the part that is taken.
            taken.quantization_config = published
        return taken
    except MMJaxError:
        raise
    # HF's classes raise anything over values that they do not take.
    except Exception as error:
        said = " ".join(str(error).split())
        raise CheckpointError(
            f"`{path / 'config.json'}` names the model type `{raw.get('model_type')}`, whose "
            f"configuration transformers could not build ({type(error).__name__}: {said})"
        ) from error


def _take_thinker(hf_config: Any) -> Any:
    """Return the configuration of an omni model's part that reads and writes text."""
    thinker = hf_config.thinker_config
    thinker.architectures = [_THINKERS[hf_config.model_type]]
    return thinker


def _take_vlm(hf_config: Any) -> Any:
    """Return the configuration of the model whose states become vectors, and how wide they are."""
    vlm = hf_config.vlm_config
    vlm.architectures, vlm.embedding_dim = hf_config.architectures, hf_config.embedding_dim
    vlm.dtype = getattr(hf_config, "dtype", None) or vlm.dtype
    # It has no head: nothing is generated.
    vlm.tie_word_embeddings = True
    return vlm


def _untie_own_head(hf_config: Any, path: Path) -> None:
    """Set `tie_word_embeddings` to false where the files have a head, as HF goes by them, too."""
    from mmjax.weights.files.safetensors import open_safetensors

    with open_safetensors(path) as tensors:
        if any(name.endswith("lm_head.weight") for name in tensors):
            hf_config.tie_word_embeddings = False


def _build_hf_config(raw: dict[str, Any]) -> Any:
    """Build the configuration of a model type that transformers does not know."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parts: dict[str, Any] = {}
    for key, value in raw.items():
        if key.endswith("_config") and isinstance(value, dict):
            model_type = str(value.get("model_type"))
            if model_type in _SAME_AS:
                value = _respell(value, model_type)
                model_type = value["model_type"]
            rope = value.get("rope_scaling") or {}
            if model_type == "phi3" and rope.get("type") == _FIRST_LONGROPE:
                value = {**value, "rope_scaling": {**rope, "type": "longrope"}}
            # NOTE: this mapping loads on use, and its `get` finds nothing.
            is_known = model_type in CONFIG_MAPPING and model_type not in _AS_WRITTEN
            make = CONFIG_MAPPING[model_type] if is_known else PreTrainedConfig
            parts[key] = make.from_dict(value)
    language_part = _LANGUAGE_PARTS[raw["model_type"]]
    if language_part is not None:
        # The name by which `get_text_config` finds it.
        parts["text_config"] = parts[language_part]
    return PreTrainedConfig(**{**raw, **parts})


def check_quantization(config: ModelConfig) -> None:
    """Raise CheckpointError for quantised weights that are not served, or are to be so again."""
    from mmjax.weights.files.method import read_method

    method = read_method(config.hf_config)
    if method is not None and config.quantization is not None:
        raise CheckpointError(
            f"`quantization` is {config.quantization}, but the checkpoint's weights are quantised "
            f"already (`quant_method` of config.json is `{method.name}`); leave it out"
        )


def _build_florence2_config(raw: dict[str, Any], path: Path) -> Any:
    """Build HF's configuration of a checkpoint in Microsoft's own layout, without its code."""
    from transformers import AutoConfig

    text = _respell({"tie_word_embeddings": True, **raw["text_config"]}, "florence2_language")
    parts: dict[str, Any] = {
        "text_config": text,
        "vision_config": _respell(raw["vision_config"], "davit"),
        # Its processor's `<image>` follows the vocabulary: no row of the table stands for it.
        "image_token_id": text["vocab_size"],
        "tie_word_embeddings": True,
    }
    config = AutoConfig.for_model(**raw | parts)
    config.name_or_path = str(path)
    return config


def _respell(part: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return a part of config.json with the keys of the model type that computes the same."""
    same, renamed = _SAME_AS[model_type]
    respelled = {new: _find(part, *old) for new, old in renamed.items()}
    return {**part, **respelled, "model_type": same}


def _find(part: Mapping[str, Any], name: str, default: Any) -> Any:
    first, _, rest = name.partition(".")
    value = part.get(first, {} if rest else default)
    return _find(value, rest, default) if rest else value


def stored_dtype(hf_config: Any) -> str | None:
    """Return the dtype that config.json names for the weights; None if it names none."""
    text_config = hf_config.get_text_config()
    named = getattr(hf_config, "dtype", None) or getattr(text_config, "dtype", None)
    # A torch.dtype if torch is installed, else a string.
    return None if named is None else str(named).removeprefix("torch.")


def _architecture(hf_config: Any) -> str:
    architectures = getattr(hf_config, "architectures", None)
    if not architectures:
        raise CheckpointError(
            "config.json has no `architectures`; add the name of the model's class to it"
        )
    for part in (getattr(hf_config, "vision_config", None), hf_config.get_text_config()):
        found = _BY_PART.get((architectures[0], getattr(part, "model_type", None)))
        if found is not None:
            return found
    return architectures[0]


def _max_position_embeddings(hf_config: Any) -> int | None:
    text_config = hf_config.get_text_config()
    # Whisper's decoder and encoder have positions of their own.
    own = getattr(text_config, "max_target_positions", None)
    return getattr(text_config, "max_position_embeddings", own)
