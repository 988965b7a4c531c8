"""Write tiny_scenes' checkpoint folder but for its weights: tokenizer, configs, chat template.

    python checkpoints/tiny_scenes/build_checkpoint.py [FOLDER]

The tokenizer is of Gemma's make (spaces as `▁`, byte fallback, runs of newlines as one token), with
a word list instead of learned merges: a word of the questions is one token, any other is spelled.
"""

import argparse
import json
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from questions import ONE_OF_TWO, ONE_WORDINGS, ORDINALS, PAIR_WORDINGS, POLITE
from scenes import COLORS, NATIVE_SIDE, SHAPES
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

MODEL_FOLDER = Path(__file__).parent / "model"

SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
SPACE = "▁"

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer with one word.",
    "You are a vision assistant. Look at the picture and answer the question.",
    "Answer the question about the picture.",
    "Be brief.",
    "Answer in English, please, and keep it short.",
)
MORE_WORDS = """
about above all also an and any anything at below bigger both but can could does done each
everything five four from give got have here how i if in is it its large largest left let like me
more most my nothing of on one only or our over please right say see seen show small smallest so
some somewhere test thank that them then there they this three to too tell two under us want was
we were where who why will with would yes no zero model user system assistant image images photo
picture pictures shape shapes object objects color colour colors colours first second same none
"""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set opening = namespace(text='') -%}
{%- if messages and messages[0]['role'] in ['system', 'developer'] -%}
    {%- if messages[0]['content'] is string -%}
        {%- set opening.text = messages[0]['content'] | trim -%}
    {%- else -%}
        {%- for part in messages[0]['content'] if part['type'] == 'text' -%}
            {%- set opening.text = opening.text + (part['text'] | trim) -%}
        {%- endfor -%}
    {%- endif -%}
    {%- set opening.text = opening.text + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if message['role'] not in ['user', 'assistant'] -%}
        {{- raise_exception("role must be `user` or `assistant` after an optional `system`") -}}
    {%- endif -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception("roles must alternate: user, assistant, user, ...") -}}
    {%- endif -%}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' -}}
    {%- if loop.first -%}{{- opening.text -}}{%- endif -%}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{- part['text'] | trim -}}
            {%- elif part['type'].startswith('image') -%}
                {{- '<start_of_image>' -}}
            {%- else -%}
                {{- raise_exception("content parts must be text or images") -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


def words() -> list[str]:
    """Every word that a question, an answer or a frame uses."""
    texts = [text for texts in ONE_WORDINGS.values() for text in texts]
    texts += [text for texts in PAIR_WORDINGS.values() for text in texts]
    texts += [text for texts in ONE_OF_TWO.values() for text in texts]
    texts += [*POLITE, *SYSTEM_PROMPTS, *ORDINALS, *COLORS, *SHAPES, MORE_WORDS]
    texts += [shape + "s" for shape in SHAPES]
    found = set(re.findall(r"[a-z]+", " ".join(re.sub(r"\{.\}", " ", t) for t in texts).lower()))
    return sorted(word for word in found if len(word) > 1)


def build_tokenizer() -> Tokenizer:
    """Return the tokenizer: special tokens, newlines, bytes, characters, words."""
    characters = [c for c in string.printable if c.isprintable() and c != " " and c == c.lower()]
    pieces = [*SPECIAL_TOKENS, *NEWLINES, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE]
    pieces += characters
    pieces += [SPACE + letter for letter in string.ascii_lowercase]
    pieces += [prefix + word for word in words() for prefix in ("", SPACE)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    assert len(vocab) == len(pieces), "a piece occurs twice"
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(rf"{SPACE}?[a-z]+|[0-9]|{SPACE}|[^a-z0-9{SPACE}]"), behavior="isolated"
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in NEWLINES])
    return tokenizer


def text_config(vocab_size: int, ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the language model's part of config.json."""
    return {
        "model_type": "gemma3_text",
        "vocab_size": vocab_size,
        "hidden_size": 160,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 2048,
        "sliding_window": 512,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "initializer_range": 0.02,
        "pad_token_id": ids["<pad>"],
        "eos_token_id": ids["<eos>"],
        "bos_token_id": ids["<bos>"],
    }


def vision_config() -> dict[str, Any]:
    """Return the tower's part of config.json."""
    return {
        "model_type": "siglip_vision_model",
        "image_size": NATIVE_SIDE,
        "patch_size": 8,
        "num_channels": 3,
        "hidden_size": 160,
        "intermediate_size": 480,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "vision_use_head": False,
    }


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Gemma 3's config.json, a thousandth of the size."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": "float32",
        "mm_tokens_per_image": 36,
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "text_config": text_config(tokenizer.get_vocab_size(), ids),
        "vision_config": vision_config(),
    }


def processor_config() -> dict[str, Any]:
    """Return processor_config.json; its `image_processor` is also preprocessor_config.json."""
    image_processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "pan_and_scan_max_num_crops": None,
        "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": NATIVE_SIDE, "width": NATIVE_SIDE},
    }
    return {
        "processor_class": "Gemma3Processor",
        "image_seq_length": 36,
        "image_processor": image_processor,
    }


def tokenizer_config() -> dict[str, Any]:
    image_tokens = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Gemma3Processor",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        **image_tokens,
        "extra_special_tokens": image_tokens,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "padding_side": "left",
    }


def write_checkpoint(folder: Path) -> None:
    """Write everything but `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    config = model_config(tokenizer)
    generation = {
        "bos_token_id": config["text_config"]["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["text_config"]["pad_token_id"],
        "do_sample": False,
    }
    processor = processor_config()
    image_processor = {**processor["image_processor"], "processor_class": "Gemma3Processor"}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for name, values in {
        "config.json": config,
        "generation_config.json": generation,
        "processor_config.json": processor,
        "preprocessor_config.json": {**image_processor, "image_seq_length": 36},
        "tokenizer_config.json": tokenizer_config(),
    }.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the checkpoint but for its weights.")
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_FOLDER)
    write_checkpoint(parser.parse_args().folder)


if __name__ == "__main__":
    main()
