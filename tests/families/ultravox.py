"""Tiny Ultravoxes: Whisper's encoder, three states an embedding, clips of chunks, Llama.

transformers has no class of it. The reference is composed here of its Whisper's and Llama's, over
chunks of one width, as ours is; `tests/golden_models/ultravox` has what the published code gave,
which computes no further than a clip's end.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmjax.models.model_source import load_model_config
from mmjax.models.ultravox.host_inputs import UltravoxHostInputs
from mmjax.models.ultravox.model import UltravoxModel
from mmjax.models.ultravox.processor import CHAT_TEMPLATE, PLACEHOLDER
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.rounding import cdiv, round_up
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, HFInputs, written
from tests.families.published import Published, Shapes
from tests.families.sizes import NO_KEYS, Keys, fit_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant
from tests.oracle import fill_with_unit_norms

EOS_TOKEN = 95
NUM_FRAMES = (24, 13, 61, 72, 19, 50)
"""Of clips, by turns: a chunk is 24."""
TEXT: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 1024, "tie_word_embeddings": False},
}
TOWER: dict[str, Any] = {
    **{"num_mel_bins": 6, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
    **{"encoder_ffn_dim": 40, "max_source_positions": 12},
}


# ---- the reference ------------------------------------------------------------------------------


class Encoder(WhisperEncoder):
    """HF's layers over chunks of one width: what is behind a chunk's frames is zero."""

    def forward(self, chunks: Any, frames: Any, widths: Any) -> Any:  # type: ignore[override]
        """`frames`: of sound; `widths`: of what the published encoder is given."""
        places = torch.arange(chunks.shape[-1])[None]
        first, second = (getattr(self, name) for name in ("conv1", "conv2"))
        x = nn.functional.gelu(first(chunks)) * (places < widths[:, None])[:, None]
        x = nn.functional.gelu(second(x)).transpose(1, 2)
        x = x + self.embed_positions.weight
        places = torch.arange(x.shape[1])[None]
        is_key = places < ((frames + 1) // 2)[:, None]
        mask = torch.where(is_key, 0.0, torch.finfo(x.dtype).min)[:, None, None]
        for layer in self.layers:
            x = layer(x, mask.expand(-1, 1, x.shape[1], -1))
        return self.layer_norm(x) * (places < ((widths + 1) // 2)[:, None])[..., None]


class Projector(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.text_config.hidden_size, config.hidden_size
        self.is_gated, has_mid = config.projector_act == "swiglu", config.projector_ln_mid
        middle, self.size = inner // (1 + self.is_gated), config.stack_factor
        self.ln_pre = LlamaRMSNorm(config.audio_config.d_model * self.size, eps=1e-6)
        self.linear_1 = nn.Linear(len(self.ln_pre.weight), inner, bias=False)
        self.linear_2 = nn.Linear(middle, width, bias=False)
        self.ln_mid = LlamaRMSNorm(middle, eps=1e-6) if has_mid else nn.Identity()
        self.ln_post = nn.Identity() if has_mid else LlamaRMSNorm(width, eps=1e-6)

    def forward(self, x: Any) -> Any:
        count, states, width = x.shape
        x = nn.functional.pad(x, (0, 0, 0, -states % self.size))
        x = self.linear_1(self.ln_pre(x.reshape(count, -1, self.size * width)))
        if self.is_gated:
            half = x.shape[-1] // 2
            x = x[..., :half] * nn.functional.silu(x[..., half:])
        else:
            x = nn.functional.gelu(x)
        return self.ln_post(self.linear_2(self.ln_mid(x)))


class Reference(nn.Module):
    """By the published names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        config.audio_config._attn_implementation = "eager"
        self.audio_tower = Encoder(config.audio_config)
        self.multi_modal_projector = Projector(config)
        self.language_model: Any = LlamaForCausalLM(config.text_config)

    def get_input_embeddings(self) -> Any:  # PEFT asks
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.language_model.get_output_embeddings()

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights alone."""
        folder.mkdir(exist_ok=True)
        tensors = dict(self.state_dict())
        if self.config.text_config.tie_word_embeddings:
            del tensors["language_model.lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def embed(self, ids: Any, chunks: Any = None, **more: Any) -> Any:
        embeds = self.get_input_embeddings()(ids)
        if chunks is not None:
            is_read, place = more.pop("is_read"), more.pop("place")
            rows = self.multi_modal_projector(self.audio_tower(chunks, **more))
            embeds = embeds.clone()
            embeds[0, place] = rows[is_read]
        return embeds

    def forward(self, input_ids: Any, attention_mask: Any, **clips: Any) -> Any:
        return self.language_model(inputs_embeds=self.embed(input_ids, **clips))

    def generate(self, input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
        names = ("chunks", "frames", "widths", "is_read", "place")
        clips = {name: kwargs.pop(name) for name in names if name in kwargs}
        return self.language_model.generate(
            input_ids=input_ids,
            inputs_embeds=self.embed(input_ids, **clips),
            attention_mask=attention_mask,
            **kwargs,
        )


# ---- its arrays ---------------------------------------------------------------------------------


class UltravoxConfig(PreTrainedConfig):
    """Whose keys are as they are given."""

    model_type = "ultravox"


def make_config(**keys: Any) -> Any:
    """Return what a config.json of these keys is read as."""
    audio, text = WhisperConfig(**keys.pop("audio_config")), LlamaConfig(**keys.pop("text_config"))
    config = UltravoxConfig(**keys, audio_config=audio, text_config=text)  # type: ignore[call-arg]
    config.architectures = ["UltravoxModel"]
    return config


def tiny_config(*, text: Keys = NO_KEYS, audio: Keys = NO_KEYS, **keys: Any) -> Any:
    """Return a config of width 32; a chunk is 24 frames, 12 states and 4 embeddings."""
    return make_config(
        text_config={**TEXT, **text},
        audio_config={**TOWER, **audio},
        **{
            **{"stack_factor": 3, "hidden_size": 40, "projector_act": "swiglu"},
            **{"projector_ln_mid": True, "audio_latency_block_size": None},
            **keys,
        },
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a clip's spectrogram, zeros behind its end."""
    num_frames = NUM_FRAMES[media.seed % len(NUM_FRAMES)]
    host_inputs = UltravoxHostInputs(config)
    size, num_bins = host_inputs.chunk_frames, config.audio_config.num_mel_bins
    features = np.zeros((num_bins, round_up(num_frames, size)), np.float32)
    shape = (num_bins, num_frames)
    features[:, :num_frames] = np.random.default_rng(media.seed).normal(size=shape)
    tensors = {
        "input_features": features.reshape(num_bins, -1, size).swapaxes(0, 1),
        "num_frames": np.array(num_frames, np.int32),
    }
    ids = [EOS_TOKEN] * sum(host_inputs.count_chunk_rows(num_frames))
    return DrawnItem(tensors, ids)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as the module above takes it."""
    config, data = reference.config, {}
    size, stack = 2 * config.audio_config.max_source_positions, config.stack_factor
    if sample.items:
        frames, widths, chunks, places = [], [], [], []
        for item in sample.items:
            total = int(item.tensors["num_frames"])
            chunks.append(item.tensors["input_features"])
            own = [min(size, total - start) for start in range(0, total, size)]
            frames += own
            widths += own if len(own) == 1 else [size] * len(own)
            place = item.position
            places += range(place.offset, place.offset + place.length)
        rows = np.arange(cdiv(size // 2, stack))[None]
        data = {
            "chunks": np.concatenate(chunks),
            "frames": np.array(frames),
            "widths": np.array(widths),
            "is_read": rows < np.array([cdiv(one, 2 * stack) for one in frames])[:, None],
            "place": np.array(places),
        }
    return make_reference_inputs(sample.token_ids, data)


TINY = TinyFamily(
    name="ultravox",
    model_class=UltravoxModel,
    reference_class=Reference,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(3, 90),
    published_head_dim=64,
    max_embeds={"audio": 12},
    variants={
        "a norm before the second layer": Variant({}, 8),
        "a norm behind it, another activation, one key head, a tied head": Variant(
            {
                "projector_ln_mid": False,
                "projector_act": "gelu",
                "stack_factor": 5,
                "text": {"num_key_value_heads": 1, "tie_word_embeddings": True},
                "audio": {"max_source_positions": 12},
            },
            8,
        ),
    },
)


def list_shapes(config: Any) -> Shapes:
    """Return the published names and shapes; a head that is the table is in no file."""
    with torch.device("meta"):
        tensors = Reference(config).state_dict()
    if config.text_config.tie_word_embeddings:
        del tensors["language_model.lm_head.weight"]
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# ---- its prompts and directories ----------------------------------------------------------------

EXTRACTOR = {
    **{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 1},
    **{"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "return_attention_mask": False},
    **{"processor_class": "WhisperProcessor", "padding_value": 0.0},
}
"""A chunk is a second: 13 embeddings of 4 states."""
CHUNK_FRAMES, FRAMES_PER_ROW = 100, 8


LATE_NORM: dict[str, Any] = {"projector_ln_mid": False, "projector_act": "gelu"}
"""As before version 0.5, but for the activation."""


def write_files(path: Path, **keys: Any) -> Path:
    """Write the files of a whole checkpoint without weights; `keys`: of config.json."""
    marks = ("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>")
    tokenizer = make_tokenizer(marks, eos="<|eot_id|>", named={"bos_token": marks[-1]})
    config = tiny_config(
        text=fit_text(tokenizer),
        audio={"num_mel_bins": 8, "max_source_positions": CHUNK_FRAMES // 2},
        stack_factor=FRAMES_PER_ROW // 2,
        eos_token_id=tokenizer.eos_token_id,
        **keys,
    )
    files: Any = {"chat_template": CHAT_TEMPLATE, "preprocessor_config": EXTRACTOR}
    return write_directory(path, config, tokenizer, **files)


path = made_once(write_files)


def make_reference(config: Any) -> Any:
    """Return the random model of a directory's config."""
    model = Reference(config).eval()
    fill_with_unit_norms(model)
    return model


def write(folder: Path, **keys: Any) -> Path:
    """Write the files, and random weights by the published names."""
    write_files(folder, **keys)
    make_reference(load_model_config(str(folder)).hf_config).save_pretrained(folder)
    return folder


@cache
def hf_parts() -> Any:
    """HF's own tokenizer and feature extractor."""
    return AutoTokenizer.from_pretrained(path()), WhisperFeatureExtractor.from_pretrained(path())


def call_published(prompt: str, clips: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Do what the published processor does of one clip after the other."""
    tokenizer, extractor = hf_parts()
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in prompt.split(PLACEHOLDER)]
    ids, chunks = list(parts[0]), []
    for clip, part in zip(clips, parts[1:], strict=True):
        padded = np.pad(clip, (0, max(320 - len(clip), 0)))
        settings: Any = {"padding": "longest", "pad_to_multiple_of": 160, "truncation": False}
        made = extractor(
            padded,
            sampling_rate=16_000,
            return_attention_mask=True,
            return_tensors="np",
            **settings,
        )
        features, num_frames = made["input_features"][0], int(made["attention_mask"].sum())
        for start in range(0, num_frames, CHUNK_FRAMES):
            chunk = features[:, start : start + CHUNK_FRAMES]
            chunks.append(np.pad(chunk, ((0, 0), (0, CHUNK_FRAMES - chunk.shape[1]))))
            number = cdiv(min(num_frames - start, CHUNK_FRAMES), FRAMES_PER_ROW)
            ids += [tokenizer.eos_token_id] * number
        ids += part
    return HFInputs(ids, {"input_features": np.stack(chunks)} if chunks else {})


TURN = "<|start_header_id|>{}<|end_header_id|>\n\n"
ULTRAVOX = Family(
    **written(TINY, write_files) | {"write": write},
    has_reference=False,
    published=Published(make_config=make_config, list_shapes=list_shapes),
    question="what is said",
    rendered=(
        f"<|begin_of_text|>{TURN.format('user')}{PLACEHOLDER}what is it<|eot_id|>"
        f"{TURN.format('assistant')}a car<|eot_id|>"
        f"{TURN.format('user')}which color<|eot_id|>{TURN.format('assistant')}"
    ),
    with_system=(
        "<|begin_of_text|>",
        f"<|begin_of_text|>{TURN.format('system')}be short<|eot_id|>",
    ),
    call_hf=call_published,
    embed_token_ids=lambda processor: [processor.info.get_tokenizer().eos_token_id],
    placeholder=PLACEHOLDER,
    tensors={"input_features": 2e-5},
    clip_lengths=(16_000, 20_001, 641, 33_345, 9_600),
    probed=("audio_tower.layers.1", "multi_modal_projector"),
)
