"""Asks the published code of Ultravox about the tiny checkpoints of `tests/families/ultravox.py`.

`git archive HEAD ultravox/__init__.py ultravox/model` of github.com/fixie-ai/ultravox, unpacked to
a folder on PYTHONPATH beside this tree; then `python tests/golden_models/ultravox/make.py`.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import load_file
from ultravox.model import ultravox_model, ultravox_processing
from ultravox.model.ultravox_config import UltravoxConfig

from tests.families.ultravox import LATE_NORM, write
from tests.models.test_clip_laws import RATE, draw_clip

OUT = Path(__file__).parent
NUM_TOKENS, NUM_LOGITS = 8, 2
CASES: dict[str, tuple[str, list[int], bool]] = {
    "no clip": ("what color is the circle", [], False),
    "behind a turn": ("<|start_header_id|>x<|eot_id|>\nlook <|audio|>\nwhat?", [1_200], False),
    "a chunk": ("look\n<|audio|>\nwhat is it?", [16_000], False),
    "two of one length": ("<|audio|><|eot_id|><|audio|> which color", [9_601, 9_601], False),
    "two chunks": ("<|audio|>which color", [20_001], False),
    "a sample": ("look <|audio|> what", [1], False),
    "a norm behind": ("look at <|audio|>, which color?", [33_345], True),
}
"""A prompt, its clips' samples, and whether the projector's norm is behind its second layer."""


def restore_transformers() -> None:
    """Give transformers 5.23 back what the code asks of version 4."""
    transformers.modeling_utils._init_weights = False  # type: ignore[attr-defined]
    layer = ultravox_model.whisper.WhisperEncoderLayer
    plain = layer.forward

    def forward(self: Any, x: Any, mask: Any, **_: Any) -> tuple[Any]:
        return (plain(self, x, mask.expand(-1, 1, x.shape[1], -1)),)

    def extend(self: Any, mask: Any, shape: Any, dtype: Any) -> Any:
        return (1.0 - mask[:, None, None].to(dtype)) * torch.finfo(dtype).min

    layer.forward = forward
    ultravox_model.ModifiedWhisperEncoder.get_extended_attention_mask = extend
    # The tiny one has a head of its own, and weights that are given below.
    ultravox_model.UltravoxModel.post_init = lambda self: None


def load_model(path: Path) -> Any:
    """Return the published model with a directory's weights."""
    raw = json.loads((path / "config.json").read_text())
    names = ("hidden_size", "stack_factor", "projector_act", "projector_ln_mid")
    parts = {name: raw[name] for name in ("audio_config", "text_config")}
    config = UltravoxConfig(**parts, **{name: raw[name] for name in names})
    config.audio_config._name_or_path = "whisper"  # by which it chooses its encoder
    config.torch_dtype = torch.float32
    for part in (config.audio_config, config.text_config):
        part._attn_implementation = "eager"
    model = ultravox_model.UltravoxModel(config)
    model.load_state_dict(load_file(path / "model.safetensors"), assign=True)
    for module in model.modules():  # whose frequencies are in no file
        if "RotaryEmbedding" in type(module).__name__:
            module.__init__(config.text_config)
    return model.eval()


def make_processor(path: Path, model: Any) -> Any:
    """Return the published processor, whose parts are HF's of the directory."""
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)

    def hear(clips: Any, **kwargs: Any) -> Any:
        return extractor(clips, return_tensors="np", **kwargs)

    hear.feature_extractor = extractor  # type: ignore[attr-defined]
    processor = ultravox_processing.UltravoxProcessor.__new__(ultravox_processing.UltravoxProcessor)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
    processor.audio_processor, processor.tokenizer = hear, tokenizer
    processor.vocab, processor.audio_token_replacement = tokenizer.get_vocab(), tokenizer.eos_token
    processor.stack_factor, processor.encoder_ds_factor = model.config.stack_factor, 2
    processor.audio_context_size = model.audio_tower_context_length
    return processor


@torch.no_grad()
def answer(model: Any, inputs: Any) -> np.ndarray:
    """Return the logits of greedy tokens, each of all before it."""
    embed, ids = model.get_input_embeddings(), inputs["input_ids"]
    embeds = embed(ids)
    if "audio_values" in inputs:
        clips = {name: inputs[name] for name in inputs if name.startswith("audio_")}
        embeds = model._prepare_audio_embeds(inputs_embeds=embeds, **clips)
    rows = []
    for _ in range(NUM_TOKENS):
        rows.append(model.language_model(inputs_embeds=embeds).logits[0, -1])
        embeds = torch.cat([embeds, embed(rows[-1].argmax()[None, None])], dim=1)
    return torch.stack(rows).numpy()


def main() -> None:
    """Write expected.json and expected.safetensors."""
    restore_transformers()
    cases, tensors = [], {}
    with TemporaryDirectory() as folder:
        for name, (prompt, lengths, is_late) in CASES.items():
            path = Path(folder) / str(is_late)
            if not path.exists():
                write(path, **(LATE_NORM if is_late else {}))
            model = load_model(path)
            clips = [draw_clip(seed, length) for seed, length in enumerate(lengths)]
            processor = make_processor(path, model)
            inputs = processor(text=prompt, audios=clips or None, sampling_rate=RATE)
            logits = answer(model, inputs)
            tensors[f"{name}.logits"] = logits[:NUM_LOGITS]
            starts, counts = ("audio_token_start_idx", "audio_token_len")
            case = {
                **{"name": name, "prompt": prompt, "clip_lengths": lengths, "is_late": is_late},
                "prompt_token_ids": inputs["input_ids"][0].tolist(),
                "chunks": [
                    [int(start), int(count)]
                    for start, count in zip(
                        inputs.get(starts, ()), inputs.get(counts, ()), strict=True
                    )
                ],
                "output_token_ids": logits.argmax(-1).tolist(),
            }
            cases.append(case)
    (OUT / "expected.json").write_text(json.dumps({"cases": cases}) + "\n")
    save_file(tensors, OUT / "expected.safetensors")


if __name__ == "__main__":
    main()
