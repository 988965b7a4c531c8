"""What tests build instead of downloading: tokenizers, checkpoints, pictures, prompts.

All by formula. Knows nothing of mmjax: an oracle built from here is built apart.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

Layout = Literal["hub", "save_pretrained"]

PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"
TURN_START, TURN_END = "<start_of_turn>", "<end_of_turn>"
IMAGE_START, IMAGE_END, IMAGE_SOFT = "<start_of_image>", "<end_of_image>", "<image_soft_token>"

WORDS = (
    "the picture is what color colour which shape how many are there circle square triangle star "
    "red green blue yellow purple orange black number in a an two first second same yes no "
    "Here original image and here some crops to help you see better describe left of"
).split()
"""Words that become one token each; every other text falls apart into letters and bytes."""

GEMMA3_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first = messages[0]['content'] if messages[0]['content'] is string"
    " else messages[0]['content'][0]['text'] -%}"
    "{%- set prefix = first + '\n\n' -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set prefix = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for message in turns -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)


class ByteTokenizer:
    """Text as its UTF-8 bytes: ids 0 to 255; special tokens, if any, from 256 on.

    For tests that need ids and text, and no model.
    """

    def __init__(self, special_tokens: Sequence[str] = (EOS, IMAGE_SOFT)) -> None:
        self.token_to_id = {token: 256 + i for i, token in enumerate(special_tokens)}
        self.id_to_token = {i: token for token, i in self.token_to_id.items()}
        self.vocab_size = 256 + len(special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            token = next((t for t in self.token_to_id if text.startswith(t)), None)
            if token is None:
                ids.extend(text[0].encode())
                text = text[1:]
            else:
                ids.append(self.token_to_id[token])
                text = text[len(token) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        parts: list[bytes] = []
        for i in ids:
            if i < 256:
                parts.append(bytes([i]))
            elif not skip_special_tokens:
                parts.append(self.id_to_token[i].encode())
        return b"".join(parts).decode(errors="replace")


def _gemma_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return pieces and merges: special tokens, 256 bytes, printable ASCII, then the words."""
    pieces = [PAD, EOS, BOS, UNK, *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    pieces += [chr(i) for i in range(33, 127)]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        piece = word[0]
        for right in [*word[1:], "▁"]:
            if piece + right not in pieces:
                pieces.append(piece + right)
                merges.append((piece, right))
            piece += right
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges


def gemma_tokenizer(*, named: Mapping[str, str] | None = None) -> Any:
    """Return an HF tokenizer that behaves as Gemma's: `▁` for space, bytes, newline runs.

    A run of two to six newlines is one token, and the longest run wins, so that putting an image's
    tokens beside a newline merges tokens, as with the published tokenizer.

    Args:
        named: Special tokens that are attributes, as HF's processors want; None: Gemma 3's.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocab, merges = _gemma_vocab()
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token=UNK, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    runs = ["\n" * n for n in range(1, 7)]
    tokenizer.add_tokens([AddedToken(run, special=False, normalized=False) for run in runs])
    special = [PAD, EOS, BOS, UNK, TURN_START, TURN_END, IMAGE_START, IMAGE_END, IMAGE_SOFT]
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named
        or {"image_token": IMAGE_SOFT, "boi_token": IMAGE_START, "eoi_token": IMAGE_END},
    )


def tiny_gemma3_config(
    tokenizer: Any = None,
    *,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    tokens_per_image: int = 4,
) -> Any:
    """Return a tiny Gemma 3 config: width 32, 6 layers (5 sliding, 1 global), 16 patches."""
    from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    tokenizer = tokenizer or gemma_tokenizer()
    text_settings: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision_settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "vision_use_head": False,
    }
    return Gemma3Config(
        text_config=Gemma3TextConfig(**{**text_settings, **(text or {})}),
        vision_config=SiglipVisionConfig(**{**vision_settings, **(vision or {})}),
        mm_tokens_per_image=tokens_per_image,
        boi_token_index=tokenizer.convert_tokens_to_ids(IMAGE_START),
        eoi_token_index=tokenizer.convert_tokens_to_ids(IMAGE_END),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_SOFT),
    )


def fill_by_name(model: Any, seed: int = 0) -> None:
    """Fill a torch Gemma 3 with random values that depend on names and `seed` alone.

    Scaled so that activations stay near 1 and the next token depends on picture and text.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "little"))
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if name.endswith("bias"):
                value *= 0.02
            elif "norm" in name.lower():
                ones = ("vision_tower" in name and "layer_norm" in name) or "post_layernorm" in name
                value = (1.0 if ones else 0.0) + 0.05 * value
            elif "embed_tokens" in name:
                value /= parameter.shape[-1] ** 0.5
            elif "position_embedding" in name:
                value *= 0.1
            else:
                value /= parameter[0].numel() ** 0.5
            parameter.copy_(value.to(parameter.dtype))


def tiny_gemma3_checkpoint(
    path: Path,
    *,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    tokens_per_image: int = 4,
    image_processor: Mapping[str, Any] | None = None,
    seed: int = 0,
    layout: Layout = "hub",
    max_shard_size: str = "1GB",
) -> Path:
    """Write a complete random Gemma 3 checkpoint directory, as `save_pretrained` does; return it.

    Args:
        path: Where; made if it is not there.
        text: Keys of `text_config` that differ from `tiny_gemma3_config`.
        vision: Keys of `vision_config` that differ.
        tokens_per_image: Soft tokens of one image; a square.
        image_processor: Arguments of HF's image processor that differ (pan and scan, say).
        seed: Other seed, other weights.
        layout: `hub` names the tower's tensors `vision_tower.vision_model.*`.
        max_shard_size: Small enough, it yields several files and an index.
    """
    from transformers import Gemma3ForConditionalGeneration

    path = Path(path)
    tokenizer = gemma_tokenizer()
    config = tiny_gemma3_config(
        tokenizer, text=text, vision=vision, tokens_per_image=tokens_per_image
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    fill_by_name(model, seed)
    generation = model.generation_config
    generation.bos_token_id = tokenizer.bos_token_id
    generation.pad_token_id = tokenizer.pad_token_id
    generation.eos_token_id = [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids(TURN_END),
    ]
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if layout == "hub":
        _rename_tower(path)
    save_gemma3_processor(path, tokenizer, config, image_processor=image_processor)
    return path


def save_gemma3_processor(
    path: Path,
    tokenizer: Any,
    config: Any,
    *,
    image_processor: Mapping[str, Any] | None = None,
) -> None:
    """Write tokenizer, image processor, processor and chat template files beside the weights."""
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    side = config.vision_config.image_size
    settings: dict[str, Any] = {
        "size": {"height": side, "width": side},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(**{**settings, **(image_processor or {})}),
        tokenizer,
        chat_template=GEMMA3_CHAT_TEMPLATE,
        image_seq_length=config.mm_tokens_per_image,
    )
    processor.save_pretrained(path)


def _rename_tower(path: Path) -> None:
    """Give the tower's tensors the hub's names, in every file and in the index."""
    from safetensors.torch import load_file, save_file

    def rename(name: str) -> str:
        old, new = "vision_tower.", "vision_tower.vision_model."
        if not name.startswith(old) or name.startswith(new):
            return name
        return new + name.removeprefix(old)

    for file in path.glob("*.safetensors"):
        tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    index_file = path / "model.safetensors.index.json"
    if index_file.is_file():
        index = json.loads(index_file.read_text())
        index["weight_map"] = {rename(k): v for k, v in index["weight_map"].items()}
        index_file.write_text(json.dumps(index, indent=2))


def is_slow_run() -> bool:
    """Return whether this is `make test-slow`, which draws new examples."""
    from hypothesis import settings

    return settings.get_current_profile_name() == "random"


def each_once(*values: Iterable[Any]) -> list[Any]:
    """Return rows of all combinations, of which the default run has some, and the slow one all.

    By default each value is in a row: the n-th of each list together, of the shorter ones from the
    beginning again.
    """
    lists = [list(one) for one in values]
    by_default = {
        tuple(number % len(one) for one in lists) for number in range(max(map(len, lists)))
    }
    return [
        pytest.param(
            *(one[place] for one, place in zip(lists, places, strict=True)),
            marks=() if places in by_default else pytest.mark.slow,
        )
        for places in product(*(range(len(one)) for one in lists))
    ]


def num_examples(most: int) -> int:
    """Return how many examples a property is tried with: `most` in the slow run, else fewer."""
    return most if is_slow_run() else max(1, most // 3)


def draw(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an RGB picture of three waves of colour; another seed, another picture."""
    return Image.fromarray(_draw_pixels(width, height, seed))


@lru_cache(maxsize=64)
def _draw_pixels(width: int, height: int, seed: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    waves = [
        np.sin(x * (0.11 + 0.03 * channel) + y * (0.07 + 0.02 * channel) + seed * 1.7 + channel)
        for channel in range(3)
    ]
    return np.stack([(wave + 1) * 127.5 for wave in waves], axis=-1).astype(np.uint8)


def draw_video(num_frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """Return uint8[num_frames, height, width, 3], each frame another picture."""
    frames = [draw(width, height, seed=seed * 100 + index) for index in range(num_frames)]
    return np.stack([np.asarray(frame) for frame in frames])


def random_text(seed: int, num_words: int) -> str:
    """Return `num_words` words, some of them outside the tokenizer's vocabulary."""
    chooser = random.Random(seed)
    strange = ("Zürich", "x=1;", "¿qué?", "naïve", "日本", "\N{SNOWMAN}", "1,024", "\t")
    return " ".join(
        chooser.choice(strange if chooser.random() < 0.1 else WORDS) for _ in range(num_words)
    )


def random_image_prompt(seed: int, num_images: int, num_words: int = 12) -> str:
    """Return a Gemma 3 user turn with `num_images` image markers among random words."""
    chooser = random.Random(seed)
    words = random_text(seed, num_words).split(" ")
    for _ in range(num_images):
        words.insert(chooser.randrange(len(words) + 1), IMAGE_START)
    return f"{TURN_START}user\n{' '.join(words)}{TURN_END}\n{TURN_START}model\n"


def random_pictures(seed: int, num_images: int, max_side: int = 96) -> list[Image.Image]:
    """Return pictures of random sizes, from 1x1 to `max_side` square."""
    chooser = random.Random(seed)
    sizes = [
        (chooser.randint(1, max_side), chooser.randint(1, max_side)) for _ in range(num_images)
    ]
    return [draw(width, height, seed + i) for i, (width, height) in enumerate(sizes)]
