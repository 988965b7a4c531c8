"""Qwen-VL against what the published code made of a tiny checkpoint: ids, pixels, logits."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from mmjax import LLM, SamplingParams
from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import CheckpointError, RequestError
from mmjax.models.qwen_vl.processor import load_tokenizer
from mmjax.models.registry import create_processor
from mmjax.parity.reference import make_pixels
from mmjax.training.samples import make_sample
from tests.families.directories import GOLDEN_MODELS
from tests.families.golden_models import NUM_STEPS, GoldenModel, to_ranges

PATH = GOLDEN_MODELS / "qwen_vl_chat"
PLAIN = GoldenModel("qwen_vl_chat", PATH)
CASES = list(PLAIN.cases)


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> GoldenModel:
    """The same weights with a trained length of 128."""
    path = Path(copytree(PATH, tmp_path_factory.mktemp("long") / "model"))
    (path / "config_longctx.json").replace(path / "config.json")
    return GoldenModel("qwen_vl_chat", path)


def of_case(case: dict[str, Any], long_context: GoldenModel) -> GoldenModel:
    return PLAIN if case["config"] == "config.json" else long_context


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["paths", "without", "tokens", "published"])
def test_ids_and_placeholders_are_the_published_ones(name: str, kind: str, is_cached: bool):
    case = PLAIN.cases[name]
    cache = MultiModalProcessorOnlyCache(2**26) if is_cached else None
    processor = create_processor(PATH, cache=cache)
    tokenizer = processor.info.get_tokenizer()
    prompt = {
        "paths": case["prompt"],
        "without": case["prompt_without_paths"],
        "tokens": tokenizer.encode(case["prompt_without_paths"]),
        "published": case["published_prompt_token_ids"],
    }[kind]
    for _ in range(2):
        inputs = processor.apply(prompt, PLAIN.images(case))
        assert inputs.prompt_token_ids == case["prompt_token_ids"]
        assert inputs.mm_placeholders.get("image", []) == to_ranges(case)


@pytest.mark.parametrize("name", ["tiny", "photo"])
def test_pixels_are_the_published_ones(name: str):
    case = PLAIN.cases[name]
    inputs = PLAIN.processor.apply(case["prompt"], PLAIN.images(case))
    (item,) = make_sample(inputs).items
    np.testing.assert_allclose(
        make_pixels(item.tensors)["pixel_values"],
        PLAIN.tensors[f"image.{name}.pixel_values"],
        atol=1e-6,
    )


@pytest.mark.parametrize("name", CASES)
def test_embeddings_logits_and_tokens_are_the_published_ones(
    name: str, long_context: GoldenModel, record_property: Any
):
    case = PLAIN.cases[name]
    golden = of_case(case, long_context)
    inputs = golden.processor.apply(case["prompt"], golden.images(case))
    sample = make_sample(inputs)
    if case["images"]:
        expected = np.concatenate(
            [golden.tensors[f"image.{image}.image_embeds"] for image in case["images"]]
        )
        difference = np.abs(golden.model.embed(sample) - expected).max()
        record_property("embeddings", float(difference))
        assert difference < 2e-4
    logits = golden.model.decode(sample, NUM_STEPS)
    assert logits.argmax(-1).tolist() == case["greedy_token_ids"]
    difference = np.abs(logits - golden.tensors[f"case.{name}.step_logits"]).max()
    record_property("logits", float(difference))
    assert difference < 1e-3


class TestTokenizer:
    TEXTS = (
        "Describe this image.",
        "it's 1234 things,\n\n  and ünï日本語 \t tabs",
        "<|im_start|>user\nPicture 1: <img></img>\n<|im_end|>",
        "e\u0301galite\u0301",
        "",
    )

    def test_ranks_give_what_the_json_gives(self, tmp_path: Path):
        path = Path(copytree(PATH, tmp_path / "ranks"))
        (path / "tokenizer.json").unlink()
        ranks, plain = load_tokenizer(path), load_tokenizer(PATH)
        prompts = [case["prompt"] for case in PLAIN.cases.values()]
        for text in (*self.TEXTS, *prompts):
            ids = ranks.encode(text)
            assert ids == plain.encode(text)
            assert ranks.decode(ids) == plain.decode(ids)

    def test_a_directory_without_either_is_told(self, tmp_path: Path):
        with pytest.raises(CheckpointError, match=r"neither tokenizer.json nor qwen.tiktoken"):
            load_tokenizer(tmp_path)

    def test_a_line_that_is_no_rank_is_told(self, tmp_path: Path):
        (tmp_path / "qwen.tiktoken").write_text("IQ== 0\nnonsense\n")
        with pytest.raises(CheckpointError, match=r"line 2 of `qwen\.tiktoken`"):
            load_tokenizer(tmp_path)


class TestPrompts:
    def test_a_pad_that_is_typed_is_refused(self):
        with pytest.raises(RequestError, match="`<imgpad>` at character 0, which is reserved"):
            PLAIN.processor.apply("<imgpad> hello")

    def test_images_and_their_marks_are_counted(self):
        with pytest.raises(RequestError, match=r"1 `<img></img>` placeholder but 0 images"):
            PLAIN.processor.apply("Picture 1: <img>a.png</img>")

    def test_a_start_without_an_end_stays_text(self):
        ids = PLAIN.processor.apply("<img> " * 3).prompt_token_ids
        assert ids.count(504) == 3


class TestEngine:
    """Through `LLM`, where requests share blocks, and long prompts have another rotary base."""

    GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    @pytest.mark.slow  # 17 s; one pass is compared with the published answers above
    def test_answers_are_those_of_one_pass(self, long_context: GoldenModel):
        """Together, one after the other, and with prompts of several levels of the base."""
        case = PLAIN.cases["two_images"]
        prompts: list[Any] = []
        for name in ("square", "two_images", "text_only"):
            one = PLAIN.cases[name]
            prompts.append({"prompt": one["prompt"], "multi_modal_data": PLAIN.images(one)})
        # The beginning of a longer prompt, which has another base: no block may be shared.
        short = case["prompt"][:60]
        prompts += [{"prompt": short}, {"prompt": short * 12}]
        golden = long_context
        inputs = [golden.processor.apply(p["prompt"], p.get("multi_modal_data")) for p in prompts]
        expected = [list(golden.model.generate(make_sample(one), 8)) for one in inputs]
        settings = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256}
        with LLM(str(golden.path), use_tqdm_on_load=False, **settings) as llm:
            for _ in range(2):
                together = llm.generate(prompts, self.GREEDY, use_tqdm=False)
                assert [one.outputs[0].token_ids for one in together] == expected

    def test_a_chat_with_an_image(self):
        case = PLAIN.cases["square"]
        image = PLAIN.images(case)["image"][0]
        content = [
            {"type": "image_pil", "image_pil": image},
            {"type": "text", "text": "Describe this image."},
        ]
        with LLM(str(PATH), use_tqdm_on_load=False, max_model_len=512, max_num_seqs=2) as llm:
            (answer,) = llm.chat([{"role": "user", "content": content}], self.GREEDY)
            assert len(answer.outputs[0].token_ids) == 8
            text = llm.get_tokenizer().decode(answer.prompt_token_ids)
        assert text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
        assert "<|im_start|>user\nPicture 1: <img>" in text


def test_a_qwen_without_a_tower_is_refused(tmp_path: Path):
    path = Path(copytree(PATH, tmp_path / "text"))
    config = json.loads((path / "config.json").read_text())
    del config["visual"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no `visual`"):
        create_processor(path).info.get_hf_processor()
