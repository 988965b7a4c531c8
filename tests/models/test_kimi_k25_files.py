"""Kimi K2.5's checkpoints with Moonshot's own files: names, INT4 experts, vocabulary."""

import json
import shutil
from base64 import b64encode
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mmjax.errors import CheckpointError, RequestError
from mmjax.layers.module import flatten_params, unflatten_params
from mmjax.models.kimi_k25.model import read_tower
from mmjax.models.kimi_k25.processor import respell, write_time
from mmjax.models.kimi_k25.tokenizer import load_tokenizer
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.arrays import PagedModel
from mmjax.parity.compare import LOGITS
from mmjax.weights.files.safetensors import SINGLE_FILE
from tests.families import served_model
from tests.families.directories import edit_json
from tests.families.kimi_k25 import SETTINGS, VIDEO_SETTINGS, path, tell, tiny_config
from tests.kit import draw, draw_video
from tests.weights.packers import FORMS

MEDIA: dict[str, Any] = {
    **{"in_patch_limit": 64, "patch_limit_on_one_side": 20, "in_patch_limit_each_frame": 16},
    **{"patch_size": 14, "merge_kernel_size": 2, "temporal_merge_kernel_size": 4, "sample_fps": 2},
    **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "fixed_output_tokens": None},
    **{"in_patch_limit_video": None, "max_num_frames_each_video": None},
    "timestamp_mode": "hh:mm:ss.fff",
}
"""Moonshot's settings, by their own names."""


def publish(model: Any, folder: Path) -> dict[str, np.ndarray]:
    """Write HF's weights as published, INT4 experts; return what the tree has of the experts."""
    form, heads = FORMS["w4a16"], model.config.vision_config.num_attention_heads
    tensors: dict[str, np.ndarray] = {}
    numbers: dict[str, np.ndarray] = {}
    state = {name: tensor.numpy() for name, tensor in model.reference.state_dict().items()}
    for name, array in state.items():
        told = tell(name, array.shape)
        if ".experts." in name:
            for number, (one, (rows, _)) in enumerate(told):
                expert, part = divmod(number, len(told) // len(array))
                packed = form.pack(array[expert, part * rows : (part + 1) * rows])
                prefix = one.removesuffix("weight")
                tensors |= {prefix + last: own for last, own in packed.tensors.items()}
                numbers[one] = packed.numbers
            continue
        if ".attn.q_proj." in name:
            others = [state[name.replace("q_proj", part)] for part in ("k_proj", "v_proj")]
            paired = [
                one.reshape(heads, 2, -1, *one.shape[1:]).swapaxes(1, 2).reshape(one.shape)
                for one in (array, others[0])
            ]
            array = np.concatenate([*paired, others[1]])
        for one, shape in told:
            tensors[one] = np.ascontiguousarray(array.reshape(shape))
    folder.mkdir()
    save_file(tensors, folder / SINGLE_FILE)
    return numbers


def test_published_names_and_int4_experts_are_read(tmp_path: Path):
    """The states are those of HF's weights, whose experts have the numbers that the codes mean."""
    model = served_model("kimi_k25")
    numbers = publish(model, tmp_path / "published")
    config = deepcopy(model.config)
    config.text_config.quantization_config = FORMS["w4a16"].settings  # where K2.5's has it
    found = PagedModel.from_directory(
        tmp_path / "published", model.family.model_class, config, max_len=256
    )
    tree = flatten_params(found.params)
    assert any(leaf.dtype.name == "uint8" for name, leaf in tree.items() if ".experts." in name)
    plain = dict(flatten_params(model.params))
    for name, expected in plain.items():
        if ".experts." not in name:
            np.testing.assert_array_equal(tree[name], expected, err_msg=name)
    for name in [name for name in plain if ".experts." in name]:
        layer, part = name.split(".experts.")
        layer = layer.replace("language_model.", "language_model.model.")
        each = [numbers[f"{layer}.experts.{n}.{part}.weight"] for n in range(len(plain[name]))]
        plain[name] = np.stack(each)
    sample = model.draw_sample(model.family.workload[0])
    expected = model.with_weights(unflatten_params(plain)).run(sample)
    np.testing.assert_allclose(found.run(sample)[LOGITS], expected[LOGITS], rtol=0, atol=1e-4)


def test_published_configurations_name_hfs_class(tmp_path: Path):
    folder = Path(shutil.copytree(path(), tmp_path / "model"))
    changes = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config.model_type": "kimi_k2",
        "vision_config.vt_hidden_size": 24,
    }
    edit_json(folder / "config.json", changes)
    config = load_model_config(str(folder))
    assert config.architecture == "Kimi_K25ForConditionalGeneration"
    assert config.hf_config.text_config.model_type == "deepseek_v3"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vision": {"vt_hidden_size": 32}}, "`vt_hidden_size` of `vision_config` is 32, but"),
        ({"vision": {"init_pos_emb_time": 8}}, "`init_pos_emb_time` of `vision_config` is 8"),
        ({"vision": {"merge_type": "conv"}}, "`merge_type` of `vision_config` is 'conv'"),
        ({"vision": {"pos_emb_width": 7}}, "has 5 x 7 learned positions"),
    ],
)
def test_towers_that_hfs_class_would_not_compute_are_refused(changes: Any, match: str):
    with pytest.raises(CheckpointError, match=match):
        read_tower(tiny_config(**changes))


def test_moonshots_settings_are_hfs(tmp_path: Path):
    folder = Path(shutil.copytree(path(), tmp_path / "model"))
    (folder / "video_preprocessor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": MEDIA}))
    ours, theirs = (create_processor(str(one)) for one in (folder, path()))
    images, videos = [draw(90, 70), draw(400, 30)], [(draw_video(7, 130, 40), {"fps": 4.0})]
    prompt = "<|media_pad|> and <|media_pad|> <|kimi_k25_video_placeholder|>"
    found, expected = (
        one.apply(prompt, {"image": images, "video": videos}) for one in (ours, theirs)
    )
    assert found.prompt_token_ids == expected.prompt_token_ids
    data, wanted = (one.mm_kwargs.get_data() for one in (found, expected))
    np.testing.assert_array_equal(data["pixel_values"], wanted["pixel_values"])
    np.testing.assert_array_equal(data["pixel_values_videos"], wanted["pixel_values_videos"])


def test_moonshots_settings_that_hf_does_not_know_are_refused():
    assert respell(SETTINGS, "image") == SETTINGS
    with pytest.raises(CheckpointError, match=r"`media_proc_cfg.fixed_output_tokens` .* is 64"):
        respell({"media_proc_cfg": {**MEDIA, "fixed_output_tokens": 64}}, "image")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_patches": 0}, "`max_patches` is 0"),
        ({"size": {"max_height": 4, "max_width": 6}}, "a square"),
        ({"size": 6}, "an object of `max_height`"),
    ],
)
def test_limits_that_no_picture_has_are_refused(kwargs: Any, match: str):
    processor = create_processor(str(path()))
    with pytest.raises(RequestError, match=match):
        processor.apply("<|media_pad|>", {"image": [draw(60, 60)]}, {"images_kwargs": kwargs})


def test_times_of_clips_have_hours_and_thousandths():
    times = [write_time(second) for second in (0.0, 2.5, 3725.0625, 90_000.0)]
    assert times == ["00:00:00.000", "00:00:02.500", "01:02:05.062", "01:00:00.000"]


def test_without_a_token_of_its_own_a_video_has_the_pads_of_pictures(tmp_path: Path):
    """As Moonshot's own processor writes it; its placeholder is several tokens then."""
    folder = Path(shutil.copytree(path(), tmp_path / "model"))
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("kimi_k25_video_placeholder", "other"))
    processor: Any = create_processor(str(folder))
    tokenizer = processor.info.get_tokenizer()
    video = (draw_video(6, 56, 56), {"fps": 2.0})
    prompt = "look <|kimi_k25_video_placeholder|>\nwhat"
    found = processor.apply(prompt, {"video": [video]})
    per_clip = VIDEO_SETTINGS["max_patches"] // 4
    clip = "<|media_begin|>video<|media_content|>" + "<|media_pad|>" * per_clip + "<|media_end|>"
    written = f"look 00:00:00.000{clip}00:00:02.000{clip}\nwhat"
    assert found.prompt_token_ids == tokenizer.encode(written)


def write_ranks(folder: Path) -> None:
    """Write a vocabulary as published: all bytes, and a few words."""
    words = [bytes([number]) for number in range(256)]
    words += [b"ab", "你".encode()[:2], "你".encode(), "好".encode()[:2], "好".encode()]
    words += ["你好".encode()]
    lines = [b64encode(word) + b" " + str(rank).encode() for rank, word in enumerate(words)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    added = {"262": ("[BOS]", True), "264": ("<|im_end|>", True), "265": ("<think>", False)}
    settings = {
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            number: {"content": content, "special": special}
            for number, (content, special) in added.items()
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_moonshots_vocabulary_is_read(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"neither tokenizer.json nor tiktoken.model"):
        load_tokenizer(tmp_path)
    write_ranks(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("ab你好x<|im_end|><think>ab")
    # Chinese characters are no part of the word before them.
    assert ids == [256, 261, ord("x"), 264, 265, 256]
    assert tokenizer.eos_token_id == 264
    assert tokenizer.convert_ids_to_tokens(263) == "<|reserved_token_263|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab你好x<think>ab"
