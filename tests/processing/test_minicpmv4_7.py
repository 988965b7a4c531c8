"""MiniCPM-V 4.7's own: where each token of a prompt is placed, and which items have numbers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import PromptItem
from mmjax.models.minicpmv4_6.host_inputs import MARKS, MiniCPMV47HostInputs
from mmjax.processing.tensors.inputs import PlaceholderRange
from tests.families.directories import edit_json, golden_processor
from tests.families.minicpmv4_6 import (
    END,
    IMAGE,
    IMAGE_TOKEN,
    MINICPMV4_7,
    NEWLINE,
    SLICE_END,
    SLICE_START,
    START,
    VIDEO,
    VIDEO_TOKEN,
    tiny_config,
    write_files,
)
from tests.kit import draw

Unit = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Rows and columns of a whole's embeddings, of its slices, and of a slice's embeddings."""
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5))
UNITS = st.tuples(SIZES, st.one_of(st.just((0, 0)), st.tuples(*[st.integers(1, 3)] * 2)), SIZES)
# A picture is one frame; a clip's frames follow each other.
ITEMS = st.one_of(
    st.tuples(st.just("image"), UNITS, st.just(1)),
    st.tuples(st.just("video"), UNITS, st.integers(1, 3)),
)
TEXTS = st.lists(
    st.sampled_from([5, 6, NEWLINE, NEWLINE, END, SLICE_END, START, SLICE_START]), max_size=4
)


def write_frame(unit: Unit, pad: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens of a whole and its slices, and the embeddings' rows and columns of each."""
    whole, (rows, columns), size = unit
    ids, sizes = [START, *[pad] * (whole[0] * whole[1]), END], [whole]
    for row in range(rows):
        ids += [NEWLINE] * (row > 0)
        for _ in range(columns):
            ids += [SLICE_START, *[pad] * (size[0] * size[1]), SLICE_END]
            sizes.append(size)
    return ids, sizes


@settings(max_examples=120, deadline=None)
@given(
    mode=st.sampled_from(["16x", "4x"]),
    parts=st.lists(st.tuples(TEXTS, ITEMS), min_size=1, max_size=4),
    rest=TEXTS,
)
def test_places_are_hfs(mode: str, parts: list[Any], rest: list[int]) -> None:
    """Whatever stands between items, marks of the prompt's own and nothing among it."""
    side = 4 if mode == "16x" else 2
    ids, items = list[int](), list[PromptItem]()
    targets: dict[str, list[tuple[int, int]]] = {"image": [], "video": []}
    for text, (modality, unit, num_frames) in parts:
        ids += text
        pad, suffix = (IMAGE_TOKEN, "") if modality == "image" else (VIDEO_TOKEN, "_videos")
        frame, sizes = write_frame(unit, pad)
        patches = [(rows * side, columns * side) for rows, columns in sizes * num_frames]
        tensors = {
            f"pixel_values{suffix}": np.zeros(0),
            f"target_sizes{suffix}": np.array(patches),
            f"{modality}_grids": np.array(unit[1]),
        }
        is_embed = np.equal(frame * num_frames, pad)
        items.append(PromptItem(PlaceholderRange(len(ids), len(is_embed), is_embed), tensors))
        targets[modality] += patches
        ids += frame * num_frames
    ids += rest
    config = tiny_config("minicpmv4_7", downsample_mode=mode)
    found = MiniCPMV47HostInputs(config).prompt_positions(ids, items)
    expected, deltas = ask_hf(config, ids, targets)
    assert found is not None
    assert found.prompt.tolist() == expected.tolist()
    assert found.offset == deltas


def ask_hf(
    config: Any, ids: list[int], targets: dict[str, list[tuple[int, int]]]
) -> tuple[np.ndarray, int]:
    """Return the places that HF's model gives, and by how much an answer's differ from indices."""
    names = ("_frame_end_idx", "_group_visual_frames", "get_vision_position_ids")
    own: Any = type("HF", (), {name: vars(MiniCPMV4_7Model)[name] for name in names})()
    own.config = config
    tokens = torch.tensor([ids])
    kinds = (tokens == IMAGE_TOKEN).int() + 2 * (tokens == VIDEO_TOKEN).int()
    image, video = (torch.tensor(sizes) if sizes else None for sizes in targets.values())
    find: Any = MiniCPMV4_7Model.get_rope_index
    positions, deltas = find(own, tokens, kinds, image, video)
    return positions[:, 0].numpy(), int(deltas)


def test_a_text_alone_has_its_indices() -> None:
    host_inputs = MiniCPMV47HostInputs(tiny_config("minicpmv4_7"))
    assert host_inputs.prompt_positions([5, START, 6], []) is None


def test_pictures_have_numbers_and_videos_none() -> None:
    processor = MINICPMV4_7.make_processor()
    media = {"image": draw(60, 60), "video": np.zeros((2, 60, 60, 3), np.uint8)}
    ids = processor.apply(IMAGE + VIDEO, media).prompt_token_ids
    text = processor.info.get_tokenizer().decode(ids)
    assert text.startswith("<image_id>0</image_id><image>")
    assert text.count("<image_id>") == 1


def test_marks_that_the_tokenizer_has_otherwise_are_refused(tmp_path: Path) -> None:
    path = write_files(tmp_path, "minicpmv4_7")
    edit_json(path / "config.json", {"newline_id": 5})
    with pytest.raises(CheckpointError, match=r"`newline_id` .* is 5, but the tokenizer"):
        golden_processor("minicpmv4_7", path=path).info.get_hf_processor()


@pytest.mark.parametrize("name", MARKS)
def test_a_config_without_a_mark_is_refused(name: str) -> None:
    config = SimpleNamespace(**{**vars(tiny_config("minicpmv4_7")), name: None})
    with pytest.raises(CheckpointError, match=f"config.json has no `{name}`"):
        MiniCPMV47HostInputs(config)
