"""The reference: HF's torch model on the CPU in float32, with a hook on every block.

The only module that imports torch, when it is called.
"""

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np

from mmjax.errors import ConfigError
from mmjax.parity.compare import LOGITS
from mmjax.processing.image_processors.affine import AFFINE_KEYS, apply_affine
from mmjax.weights.rules import RuleTypes, apply_rules

PROBED = re.compile(
    r"(^|\.)(layers?\.\d+|blocks\.\d+|embeddings|post_layernorm|(\w+_)?merger(_list\.\d+)?"
    r"|connector|\w*projectors?(\.\d+)?|embed_vision|embed_audio|language_projection|norm)$"
)
"""Modules whose outputs are compared, by HF's names, which both models have."""


def import_torch() -> Any:
    """Return torch; ConfigError if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(
            "parity compares with HF's torch models, and torch is not installed; "
            "`pip install 'mmjax[parity]'`"
        ) from error


def load_reference(path: Path | str, architecture: str, dtype: str = "float32") -> Any:
    """Return HF's model of a directory, in `dtype`, without EOS in generation.

    Its class is transformers' of the architecture's name, else the one for config.json's
    `model_type`: an architecture of another package is often such a model by another name.
    """
    import_torch()
    transformers = importlib.import_module("transformers")
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        model_class = _find_by_model_type(path, architecture)
    # Safetensors only: else HF falls back to pickles.
    model = model_class.from_pretrained(str(path), dtype=dtype, use_safetensors=True)
    # Without the checkpoint's sampling defaults and EOS, so that runs can be compared.
    start = getattr(model.config.get_text_config(), "decoder_start_token_id", None)
    for module in model.modules():
        # BLIP-2 generates by its inner model's.
        if hasattr(module, "generation_config"):
            module.generation_config = transformers.GenerationConfig(
                pad_token_id=0, decoder_start_token_id=start
            )
    if model.config.model_type == "whisper":
        # Its own writes the decoder's prompt itself, and goes by windows.
        generate: Any = vars(transformers.GenerationMixin)["generate"]
        model.generate = MethodType(generate, model)
    return model.eval()


def load_reference_adapter(model: Any, path: Path) -> Any:
    """Return HF's model with PEFT's layers of an adapter in it."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            "parity of an adapter compares with PEFT, which is not installed; "
            "`pip install 'mmjax[parity]'`"
        ) from error
    return peft.PeftModel.from_pretrained(model, str(path)).base_model.model.eval()


def _find_by_model_type(path: Path | str, architecture: str) -> Any:
    transformers = importlib.import_module("transformers")
    auto = transformers.AutoModelForImageTextToText
    model_type = json.loads((Path(path) / "config.json").read_text("utf-8")).get("model_type")
    with suppress(ValueError):  # of a `model_type` that it does not know
        if type(transformers.AutoConfig.from_pretrained(str(path))) in auto._model_mapping:
            return auto
    raise ConfigError(
        f"parity compares with HF's models, and transformers has none for `{architecture}`, nor "
        f"for the `model_type` `{model_type}`; register one with "
        "`AutoModelForImageTextToText.register`, or compare with a reference of your own"
    )


def map_name(name: str, rules: Sequence[RuleTypes]) -> str | None:
    """Return our tree's name of a torch module, through the rules for its tensors."""
    mapped = apply_rules(f"{name}.", rules)
    return None if mapped is None else mapped.rstrip(".")


def run_reference(model: Any, inputs: Any, rules: Sequence[RuleTypes]) -> dict[str, np.ndarray]:
    """Return the outputs of all probed modules, by our names, and the logits, of one prompt.

    Of a tower that is called once for images and once for videos, both outputs as one.

    Args:
        model: From `load_reference`.
        inputs: Torch tensors by name, of a batch of one.
        rules: The model's `rules`.
    """
    torch = import_torch()
    calls: dict[str, list[np.ndarray]] = {}
    hooks = []
    for name, module in model.named_modules():
        mapped = map_name(name, rules)
        if mapped is not None and PROBED.search(mapped):
            hooks.append(module.register_forward_hook(_keep(calls, mapped)))
    try:
        with torch.no_grad():
            logits = model(**inputs).logits
    finally:
        for hook in hooks:
            hook.remove()
    is_joined, shapes = calls_by_modality(inputs), inputs.get("spatial_shapes")
    is_packed = not {"target_sizes", "target_sizes_videos"}.isdisjoint(inputs)
    outputs = {name: _join(outputs) if is_joined else outputs[0] for name, outputs in calls.items()}
    if is_packed or shapes is not None:
        counts = [] if shapes is None else shapes.prod(-1).tolist()
        outputs |= {
            name: _join_units(found, counts)
            for name, found in calls.items()
            if not name.startswith("language_model.")
        }
    is_frame = inputs.get("input_features_mask")
    if is_frame is not None:
        outputs |= {
            name: _leave_silence_out(value, is_frame.numpy())
            for name, value in outputs.items()
            if name == "embed_audio"
        }
    outputs[LOGITS] = logits[0].numpy()
    # Of a norm within a layer HF may have rows of all heads in place of the batch of one.
    return {
        name: value[0] if name.startswith("language_model.") and len(value) == 1 else value
        for name, value in outputs.items()
    }


def calls_by_modality(inputs: Any) -> bool:
    """Return whether HF's model calls its tower for images, and then for videos."""
    return {"pixel_values", "pixel_values_videos"} <= {*inputs}


def _join(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the outputs of several calls, rows of units or patches, as those of one."""
    first, *others = outputs
    return np.concatenate([first, *(one for one in others if one.shape[1:] == first.shape[1:])])


def _leave_silence_out(outputs: np.ndarray, is_frame: np.ndarray) -> np.ndarray:
    """Return the rows of clips without their padding; `is_frame`: of a tower that halves them."""
    while is_frame.shape[1] > outputs.shape[1]:
        is_frame = is_frame[:, ::2]
    return outputs[is_frame]


def _join_units(outputs: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """Return the rows of units that are padded to so many each, or that a module had one by one."""
    padded = outputs[0]
    if counts and padded.shape[:2] == (len(counts), max(counts)):
        return np.concatenate([unit[:count] for unit, count in zip(padded, counts, strict=True)])
    return np.concatenate([one.reshape(-1, one.shape[-1]) for one in outputs])


def load_reference_processor(path: Path, model_type: str, ours: Any) -> Any:
    """Return HF's own processor, made of the parts of ours; None where ours has other parts.

    Args:
        path: The checkpoint; None is returned where it has no processor_config.json.
        model_type: By which HF finds the class, where that file names none.
        ours: What the family loads, which may be HF's own.
    """
    hf = importlib.import_module("transformers.models.auto.processing_auto")
    if isinstance(ours, hf.ProcessorMixin):
        return ours
    # Others are written anew, and have not all that HF's class asks of its parts.
    is_hfs = hasattr(getattr(ours, "image_processor", None), "hf_class")
    if not is_hfs or not (path / "processor_config.json").exists():
        return None
    parts = {"image_processor": ours.image_processor, "tokenizer": ours.tokenizer}
    settings, _ = hf.ProcessorMixin.get_processor_dict(path)
    name = settings.get("processor_class") or hf.PROCESSOR_MAPPING_NAMES.get(model_type, "")
    processor_class = hf.processor_class_from_name(name)
    if processor_class is None or parts.keys() != {*processor_class.get_attributes()}:
        return None
    in_order = [parts[attribute] for attribute in processor_class.get_attributes()]
    return processor_class.from_args_and_dict(in_order, settings)


def with_float_pixels(hf_processor: Any) -> Any:
    """Return HF's processor as HF has it, where ours keeps bytes."""
    image_processor = copy(hf_processor.image_processor)
    image_processor.__class__ = getattr(image_processor, "hf_class", type(image_processor))
    plain = copy(hf_processor)
    plain.image_processor = image_processor
    return plain


def make_pixels(tensors: Mapping[str, Any], *, colours_last: bool = False) -> dict[str, Any]:
    """Return tensors as HF's processor gives them: float32 pixels in place of bytes.

    An item's, or those of items that share an affine map.
    """
    shape = (1, 3, 1, 3) if colours_last else (1, 3, 3, 1)

    def restore(name: str, data: Any) -> Any:
        if isinstance(data, list):
            return [restore(name, one) for one in data]
        if data.dtype != np.uint8:
            return data
        if not data.size:  # no picture has a tile
            return data.astype(np.float32)
        affine = tensors[AFFINE_KEYS["video" if "video" in name else "image"]]
        # `[..., C, height, width]`, or a row for each patch.
        units = data.reshape(-1, *data.shape[-3:]) if data.ndim > 2 else data
        return apply_affine(units, affine.reshape(shape)).reshape(data.shape)

    return {
        name: restore(name, data)
        for name, data in tensors.items()
        if name not in AFFINE_KEYS.values()
    }


def make_reference_inputs(
    token_ids: Sequence[int] | np.ndarray, data: Mapping[str, Any], *, has_sizes: bool = False
) -> dict[str, Any]:
    """Return torch tensors of a batch of one, of what our processor made of a prompt.

    Lists of arrays become batches: pictures of several sizes are padded, and `image_sizes` says
    what is theirs. `has_sizes`: whether it does so of pictures of one size, too. Tuples, of numbers
    that HF's model takes in Python, stay as they are.
    """
    torch = import_torch()
    ids = torch.tensor(token_ids, dtype=torch.long)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, values in data.items():
        if isinstance(values, tuple):
            inputs[name] = values
            continue
        inputs[name] = torch.tensor(_stack(values) if isinstance(values, list) else values)
    sizes = np.array([np.shape(one) for one in data.get("pixel_values", ())])
    if sizes.shape[1:] == (3,) and (has_sizes or (sizes != sizes[0]).any()):
        inputs["image_sizes"] = torch.tensor(sizes[:, 1:])
    return inputs


def _stack(values: Sequence[np.ndarray]) -> np.ndarray:
    most = np.array([np.shape(value) for value in values]).max(0)
    padded = [np.pad(value, [(0, end) for end in most - np.shape(value)]) for value in values]
    return np.stack(padded)


def run_reference_logits(model: Any, inputs: Any) -> np.ndarray:
    """Return float32[T, V], the logits of a model in any dtype; `inputs` as of `run_reference`."""
    torch = import_torch()
    cast = {
        name: value.to(model.dtype)
        if torch.is_tensor(value) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    with torch.no_grad():
        return model(**cast).logits[0].float().numpy()


def _keep(calls: dict[str, list[np.ndarray]], name: str) -> Any:
    def hook(module: Any, arguments: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if hasattr(tensor, "numpy"):
            # Most models call a module once; BLIP-2 norms its pooled row once more.
            calls.setdefault(name, []).append(tensor.detach().numpy())

    return hook


def generate_reference(
    model: Any, inputs: Any, max_tokens: int, *, eos_token_ids: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return `max_tokens` greedy tokens, or fewer if one of `eos_token_ids` ends them."""
    torch = import_torch()
    options = {"eos_token_id": list(eos_token_ids)} if eos_token_ids else {}
    with torch.no_grad():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, **options)
    if model.config.is_encoder_decoder:
        # The output begins with the decoder's prompt: one token, unless the inputs have it.
        given = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1
        return tuple(out[0, given:].tolist())
    return tuple(out[0, inputs["input_ids"].shape[1] :].tolist())
