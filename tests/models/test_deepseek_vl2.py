"""DeepSeek-VL2 against the published code's numbers, three tiny checkpoints of its layouts.

`tiny` has plain attention, `small` latent attention, `base` also the router with a bias. The
numbers are float32 on the CPU; images are kept as bytes where a float32 of one is kept too.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.engine.core import EngineCore
from mmjax.errors import CheckpointError, RequestError
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.layers.module import bind
from mmjax.models.deepseek_vl2.model import DeepseekVLV2ForCausalLM
from mmjax.models.deepseek_vl2.processor import CHAT_TEMPLATE
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import make_pixels
from mmjax.processing import BaseMultiModalProcessor
from mmjax.training.samples import make_sample
from tests.engine.tiny import answer_all
from tests.families.directories import edit_golden
from tests.kit import draw
from tests.models.served import make_request, start_model

GOLDEN = Path(__file__).parent.parent / "golden_models"
SIZES = ("tiny", "small", "base")
NAMES = (
    *("square", "wide", "tall", "tiny", "photo"),
    *("two_images", "three_images_nocrop", "multi_turn", "text_only"),
)
MIXED = ("tiny", "text_only", "wide", "square")
FEW = ("text_only", "square")
NUM_STEPS = 16


def directory(size: str) -> Path:
    return GOLDEN / f"deepseek_vl2_{size}"


@cache
def expected(size: str) -> dict[str, Any]:
    return json.loads((directory(size) / "expected.json").read_text())["generation"]


@cache
def numbers(size: str) -> dict[str, np.ndarray]:
    return load_file(directory(size) / "expected.safetensors")


def read_config(size: str) -> Any:
    return load_model_config(str(directory(size))).hf_config


@cache
def processor(size: str, *, is_cached: bool = False) -> BaseMultiModalProcessor[Any]:
    cache = MultiModalProcessorOnlyCache(2**26) if is_cached else None
    return create_processor(directory(size), cache=cache)


@cache
def model(size: str) -> PagedModel:
    path = directory(size)
    parts: Any = (path, DeepseekVLV2ForCausalLM, read_config(size))
    return PagedModel.from_directory(*parts, max_len=256, prompt_step=256)


def process(size: str, case: dict[str, Any], **kwargs: Any) -> Any:
    images = [directory("tiny") / "images" / Path(image).name for image in case["images"]]
    return processor(size, **kwargs).apply(case["prompt"], {"image": images} if images else {})


def make_samples(size: str, names: tuple[str, ...]) -> list[Sample]:
    return [make_sample(process(size, expected(size)[name])) for name in names]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_ids_ranges_and_tiles_are_the_published_ones(size: str, name: str):
    case = expected(size)[name]
    for is_cached in (False, True, True):  # cold, warm
        inputs = process(size, case, is_cached=is_cached)
        assert inputs.prompt_token_ids == case["input_ids"]
        ranges = inputs.mm_placeholders.get("image", [])
        assert [[one.offset, one.length] for one in ranges] == case["ranges"]
        assert all(one.is_embed is None for one in ranges)
        items = [item.get_data() for item in inputs.mm_kwargs.get("image", [])]
        crops = [item["images_spatial_crop"].tolist() for item in items]
        assert crops == case["images_spatial_crop"]
        found = numbers("tiny")
        bytes_ = found.get(f"case.{name}.images_8bit")
        pixels = found.get(f"case.{name}.images")
        if bytes_ is not None:
            pixels = (bytes_.astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)
        if pixels is not None:
            ours = np.concatenate([make_pixels(item)["pixel_values"] for item in items])
            np.testing.assert_allclose(ours, pixels, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "name"),
    [
        # `base` has all that the others have, but for plain attention and routers without a bias,
        # which a picture and a text alone go through.
        pytest.param(size, name, marks=() if size == "base" or name in FEW else pytest.mark.slow)
        for size in SIZES
        for name in NAMES
    ],
)
def test_embeddings_logits_and_answers_are_the_published_ones(size: str, name: str):
    case, ours = expected(size)[name], model(size)
    sample = make_sample(process(size, case))
    tokens = case["greedy_token_ids"]
    forced = Sample(
        token_ids=np.append(sample.token_ids, tokens[:-1]).astype(np.int32), items=sample.items
    )
    wanted = numbers(size).get(f"case.{name}.image_embeds")
    if wanted is not None:
        rows = ours.embed(sample)
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=2e-5)  # reached: 3e-6
    steps = ours.run(forced)[LOGITS][sample.num_tokens - 1 :]
    logits = numbers(size)[f"case.{name}.step_logits"]
    np.testing.assert_allclose(steps, logits, rtol=0, atol=2e-4)  # reached: 8e-5
    assert steps.argmax(-1).tolist() == tokens
    if name == "wide":
        assert list(ours.generate(sample, NUM_STEPS)) == tokens


def test_a_conversation_has_the_published_ids():
    """The template writes no BOS: the tokenizer does."""
    ours = processor("tiny")
    template = ChatTemplate(CHAT_TEMPLATE, ours.info.get_tokenizer())
    roles = {"<|User|>": "user", "<|Assistant|>": "assistant"}
    for name in NAMES:
        case = expected("tiny")[name]
        messages = [
            {"role": roles[one["role"]], "content": f" {one['content']}\n"}
            for one in case["conversation"]
        ]
        assert messages.pop()["role"] == "assistant"
        assert template.render(messages) == case["prompt"]
    assert template.render([{"role": "system", "content": "Be brief."}]).startswith("Be brief.\n\n")


def test_what_stands_beside_an_image_says_how_it_is_cut():
    """Of more than two images none is cut, whatever a request asks for; and none is mixed up."""
    ours = processor("small", is_cached=True)
    images, names = [draw(150, 70, seed) for seed in range(3)], {}
    for count in (2, 3, 1, 3, 2):
        for kwargs in ({}, {"cropping": True}):
            prompt = "<image>" * count
            inputs = ours.apply(prompt, {"image": images[:count]}, hf_processor_mm_kwargs=kwargs)
            crops = [
                item.get_data()["images_spatial_crop"].tolist()
                for item in inputs.mm_kwargs["image"]
                if item is not None
            ]
            assert crops == [[1, 1] if count > 2 else [2, 1]] * count
            names.setdefault(count > 2, set()).update(inputs.mm_hashes["image"])
    assert names[True].isdisjoint(names[False])


def test_precomputed_embeddings_are_taken_with_all_their_rows():
    ours = create_processor(directory("small"), enable_mm_embeds=True)
    inputs = ours.apply(
        "see <image>", {"image": {"image_embeds": np.ones((1, 52, 64), np.float32)}}
    )
    (place,) = inputs.mm_placeholders["image"]
    assert place.length == 52
    with pytest.raises(RequestError, match="have 51 rows; an image has 25, 34"):
        ours.apply("see <image>", {"image": {"image_embeds": np.ones((1, 51, 64), np.float32)}})


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
MAX_EMBEDS = 205


def start(size: str, *, num_devices: int = 1, **settings: Any) -> EngineCore:
    return start_model(
        DeepseekVLV2ForCausalLM,
        read_config(size),
        model(size).params,
        max_embeds={"image": MAX_EMBEDS},
        max_model_len=128,
        size=num_devices,
        **{"max_num_batched_tokens": 64, **settings},
    )


def check_answers(core: EngineCore, size: str) -> None:
    """Ask all at once, and again with their beginnings in the cache."""
    expected_ids = [expected(size)[name]["greedy_token_ids"][:8] for name in MIXED]
    samples = make_samples(size, MIXED)
    for turn in ("cold", "warm"):
        requests = [make_request(f"{turn} {n}", one) for n, one in enumerate(samples)]
        assert answer_all(core, requests) == expected_ids
    assert core.compilations == 0


@pytest.mark.parametrize(
    "size",
    [pytest.param(size, marks=() if size == "small" else pytest.mark.slow) for size in SIZES],
)
def test_the_engine_answers_as_published(size: str):
    core = start(size)
    check_answers(core, size)
    assert core.stats().prefix_cache_hits > 0
    assert core.recover() == []
    check_answers(core, size)  # the learned rows are in the new pool, too


@pytest.mark.slow  # chunks of another family are in `test_schedules.py`
def test_chunks_of_seven_tokens_change_nothing():
    check_answers(start("base", max_num_batched_tokens=7), "base")


@pytest.mark.slow  # as in `test_schedules.py` of tests/engine
def test_preempted_requests_answer_as_published():
    """Prompts of 44, 13 and 75 tokens fit into 18 of 19 blocks, and their answers do not."""
    core = start("base", num_blocks=19, max_num_batched_tokens=160)
    check_answers(core, "base")
    assert core.num_preemptions > 0


@pytest.mark.slow  # two devices of every family are in the default run, four of some
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("size", ["small", "base"])
def test_more_devices_answer_as_one(size: str, num_devices: int):
    """Query heads and every expert's width are cut; the latent is on all devices."""
    core = start(size, num_devices=num_devices, max_num_batched_tokens=16)
    layer = core.params["language_model"]["layers"][1]
    cut = {
        "experts.up_proj": layer["mlp"]["experts"]["up_proj"],
        "k_b_proj": layer["self_attn"]["k_b_proj"]["weight"],
    }
    for name, leaf in cut.items():
        assert leaf.addressable_data(0).size * num_devices == leaf.size, name
    check_answers(core, size)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"tile_tag": "1D"}, "`tile_tag` is '1D'"),
        ({"global_view_pos": "tail"}, "`global_view_pos` is 'tail'"),
        ({"vision_config.model_name": "vit"}, "`vision_config.model_name` is 'vit'"),
        ({"projector_config.depth": 3}, "`projector_config.depth` is 3"),
        ({"projector_config.n_embed": 8}, "`n_embed` of `projector_config` is 8"),
        ({"language_config.topk_method": "best"}, "`language_config.topk_method` is 'best'"),
        ({"language_config.n_group": 3}, "`language_config.n_group` is 3"),
        ({"language_config.use_mla": True}, "`language_config.kv_lora_rank` is None"),
        (
            {"language_config.rope_parameters": LINEAR},
            "`language_config.rope_scaling` is of type `linear`",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_no_published_model_has_is_refused(tmp_path: Path, edit: Any, message: str):
    path = edit_golden("deepseek_vl2", tmp_path, config=edit)
    hf_config = load_model_config(str(path)).hf_config
    with pytest.raises(CheckpointError) as caught:
        DeepseekVLV2ForCausalLM(hf_config, dtype=np.float32)
    assert message in str(caught.value)


def test_files_that_contradict_each_other_are_refused(tmp_path: Path):
    path = edit_golden("deepseek_vl2", tmp_path, processor_config={"downsample_ratio": 4})
    with pytest.raises(CheckpointError, match="`downsample_ratio` of processor_config"):
        create_processor(path).info.get_hf_processor()


def test_a_sliver_is_refused_by_its_size():
    with pytest.raises(RequestError, match=r"image is 400x1 pixels; .* crop it"):
        processor("tiny").apply("<image>", {"image": draw(400, 1)})


def test_learned_rows_stand_where_the_host_says():
    """The newline is -1, the separator -2."""
    ours = model("tiny")
    newline, separator = bind(ours.graphdef, ours.params).extra_embeds()
    np.testing.assert_array_equal(newline, ours.params["image_newline"])
    np.testing.assert_array_equal(separator, ours.params["view_seperator"])
