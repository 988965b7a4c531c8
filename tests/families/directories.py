"""Directories of tiny checkpoints: committed golden ones, and those that tests write.

As the hub or `save_pretrained` lays them out. Decoders have four heads, so that four devices may
share them.
"""

import atexit
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import mkdtemp
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

from mmjax.config.engine_config import ModelConfig, MultiModalConfig
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import MULTIMODAL_REGISTRY, create_processor, get_processor_factories
from mmjax.processing import BaseMultiModalProcessor
from mmjax.processing.prepared import ProcessorCache
from tests.kit import WORDS
from tests.oracle import fill_with_unit_norms

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDEN_MODELS = GOLDEN.parent / "golden_models"
"""Checkpoints with weights, of families that transformers has no class for."""
_WITH_WEIGHTS = {
    "deepseek_vl2": "deepseek_vl2_tiny",
    "molmo": "molmo_7b_d",
    "qwen_vl": "qwen_vl_chat",
}
HEADS = {"text_config.num_attention_heads": 4, "text_config.num_key_value_heads": 4}
"""Edits of a config.json whose decoder is wrapped."""


# ---- golden directories --------------------------------------------------------------------------


def golden_path(name: str) -> Path:
    """Return the tiny checkpoint of a family."""
    return GOLDEN_MODELS / _WITH_WEIGHTS[name] if name in _WITH_WEIGHTS else GOLDEN / name


def edit_golden(name: str, folder: Path, **edits: Mapping[str, Any] | None) -> Path:
    """Copy a golden directory and change its JSON files.

    `config={"vision_config.patch_size": 7}` sets a value (None removes the key);
    `processor_config=None` removes the file.
    """
    path = Path(copytree(golden_path(name), folder / name))
    for stem, edit in edits.items():
        file = path / f"{stem}.json"
        if edit is None:
            file.unlink()
        else:
            edit_json(file, edit)
    return path


def edit_json(file: Path, edit: Mapping[str, Any]) -> None:
    """Set the values of a JSON file's keys, `outer.inner` of a nested one; None removes a key."""
    whole = json.loads(file.read_text()) if file.exists() else {}
    for keys, value in edit.items():
        *outer, last = keys.split(".")
        inner = whole
        for key in outer:
            inner = inner[key]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    file.write_text(json.dumps(whole))


# ---- directories that tests write ----------------------------------------------------------------


def make_tokenizer(
    special_tokens: Sequence[str],
    *,
    bos: str | None = None,
    eos: str = "</s>",
    pad: str = "<pad>",
    ends_with_eos: bool = False,
    named: Mapping[str, str] | None = None,
) -> Any:
    """Return an HF tokenizer of bytes and the words of `tests.kit`, as GPT-2's splits text.

    Args:
        special_tokens: Beside the other three; ids are in this order, behind the words.
        bos: Written before each text; None: nothing is.
        eos: The end of a text.
        pad: The padding.
        ends_with_eos: Whether the end is written behind each text, as T5's does.
        named: Special tokens that are attributes, as HF's processors want (`image_token`).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    pieces, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    for word in (start + word for word in WORDS for start in ("", "Ġ")):
        for i in range(1, len(word)):
            if word[: i + 1] not in pieces:
                pieces.append(word[: i + 1])
                merges.append((word[:i], word[i]))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*filter(None, (pad, eos, bos)), *special_tokens])
    if bos is not None:
        bos_id = tokenizer.token_to_id(bos)
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
        )
    if ends_with_eos:
        marks = [(eos, tokenizer.token_to_id(eos))]
        tokenizer.post_processor = TemplateProcessing(
            single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=marks
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=dict(named or {}),
    )


def write_directory(
    path: Path,
    config: Any,
    tokenizer: Any,
    *,
    chat_template: str | None = None,
    **files: Mapping[str, Any],
) -> Path:
    """Write a checkpoint's directory without weights; return it.

    Args:
        path: Made if it is not there.
        config: HF's, with `architectures`.
        tokenizer: HF's; see `make_tokenizer`.
        chat_template: Jinja; None: the checkpoint has none.
        files: JSON files by their stems, such as `preprocessor_config={...}`.
    """
    config.save_pretrained(path)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)
    for stem, content in files.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    return path


def make_random(path: Path, fill: Callable[[Any], object] = fill_with_unit_norms) -> Any:
    """Return HF's model of a directory with random weights.

    Its class is that of the architecture's name, else the one for the `model_type`.
    """
    config: Any = AutoConfig.from_pretrained(path)
    of_name = getattr(transformers, config.architectures[0], None)
    model = (of_name or AutoModelForImageTextToText.from_config)(config).eval()
    fill(model)
    return model


def save_weights(path: Path, fill: Callable[[Any], object] = fill_with_unit_norms) -> Path:
    """Write them as `save_pretrained` does, beside the other files as they are; return `path`."""
    others = {file: file.read_bytes() for file in path.glob("*.json")}
    make_random(path, fill).save_pretrained(path)
    for file, content in others.items():
        file.write_bytes(content)
    return path


def with_weights(
    write: Callable[[Path], Path], fill: Callable[[Any], object] = fill_with_unit_norms
) -> Callable[[Path], Path]:
    """Return a function that writes random weights to the directory that `write` wrote."""
    return lambda folder: save_weights(write(folder), fill)


@cache
def made_once(write: Callable[[Path], Path]) -> Callable[[], Path]:
    """Return the function that calls `write` once in a process, with an empty folder.

    The folder goes with the process; what is in it must not be changed.
    """

    @cache
    def make() -> Path:
        folder = Path(mkdtemp(prefix="mmjax-family-"))
        atexit.register(rmtree, folder, ignore_errors=True)
        path = write(folder)
        _UNCHANGING.add(path)
        return path

    return make


_UNCHANGING: set[Path] = set()
"""What `made_once` has made."""


# ---- our processors of them ----------------------------------------------------------------------


def golden_processor(
    name: str,
    *,
    path: Path | None = None,
    processor_cache: ProcessorCache | None = None,
    **mm: Any,
) -> BaseMultiModalProcessor[Any]:
    """Return our processor for the tiny checkpoint in `tests/golden/<name>`, or at `path`."""
    path = path or golden_path(name)
    is_unchanging = path in _UNCHANGING or path.parent in (GOLDEN, GOLDEN_MODELS)
    loaded, tokenizer = (_load_once if is_unchanging else _load)(path)
    config = ModelConfig(
        model=f"tiny-{name}",
        path=path,
        hf_config=deepcopy(loaded.hf_config),
        architecture=loaded.architecture,
        max_model_len=4096,
        mm=MultiModalConfig(**mm),
    )
    return create_processor(config, tokenizer, cache=processor_cache)


def _load(path: Path) -> tuple[ModelConfig, Any]:
    """Return a directory's configuration and its tokenizer."""
    config = load_model_config(str(path))
    return config, MULTIMODAL_REGISTRY.load_tokenizer(config)


_load_once = cache(_load)
"""Of a directory that nobody changes: most of the time that a processor takes to make."""


def get_placeholder_str(architecture: str, modality: str, i: int) -> str | None:
    """Return what stands for the i-th (from 1) item of a modality, as a family declares it."""
    info: Any = get_processor_factories(architecture).info
    return info.get_placeholder_str(modality, i)
