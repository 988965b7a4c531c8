"""docs/adding_a_model.md, run: its blocks as packages that mmjax knows nothing of."""

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import mmjax
from mmjax import LLM, MULTIMODAL_REGISTRY, SamplingParams
from mmjax.errors import RequestError
from mmjax.layers.module import build_abstract, flatten_params
from mmjax.models.model_source import load_model_config
from mmjax.parity.__main__ import main as run_parity
from mmjax.parity.arrays import PagedModel
from mmjax.training.samples import make_sample
from tests.kit import BOS, EOS, PAD, UNK, draw, gemma_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "adding_a_model.md"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d\.\d\de[+-]\d\d")
SEASIDE, HARBOR = "SeasideForConditionalGeneration", "HarborForConditionalGeneration"
QUESTION = "what color is the circle?"
NUM_PATCHES, NUM_QUERIES = 4, 3
SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
    "use_tqdm_on_load": False,
}
TEXT: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXELS: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def blocks(language: str) -> list[str]:
    """Return the page's blocks of a language."""
    text = PAGE.read_text(encoding="utf-8")
    found = [match.groups() for match in BLOCK.finditer(text)]
    return [body.replace(f"\n{indent}", "\n") for indent, kind, body in found if kind == language]


# ---- the packages, as pip leaves them ------------------------------------------------------------


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of the page, and the entry point of its TOML."""
    folder = tmp_path_factory.mktemp("site-packages")
    for block in blocks("python"):
        first = re.fullmatch(r"# (\w+)/(\w+\.py)", block.partition("\n")[0])
        assert first is not None, f"names no file: {block[:60]}"
        package = folder / first[1]
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        assert not (package / first[2]).exists(), f"{first[0]} is written twice"
        (package / first[2]).write_text(block)
    info = folder / "seaside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seaside\nVersion: 1.0\n")
    (toml,) = blocks("toml")
    header, *entries = toml.strip().splitlines()
    assert header.strip() == '[project.entry-points."mmjax.models"]'
    lines = ["[mmjax.models]", *(entry.strip().replace('"', "") for entry in entries)]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def installed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the packages on the path; nothing of them is imported or registered yet."""
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(MULTIMODAL_REGISTRY, "_registered", {})
    monkeypatch.setattr(MULTIMODAL_REGISTRY, "_by_entry_point", {})
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("seaside", "harbor")]:
        del sys.modules[name]


# ---- tiny random checkpoints ---------------------------------------------------------------------


def tokenizer_with_image() -> Any:
    """Return the tests' tokenizer with `<image>`, and without Gemma's names for its tokens."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=gemma_tokenizer().backend_tokenizer,
        **{"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK},
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return tokenizer


def text_settings(tokenizer: Any) -> dict[str, Any]:
    return {
        **TEXT,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


@pytest.fixture(scope="module")
def seaside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF's LLaVA with random weights, under the architecture's name."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    path = tmp_path_factory.mktemp("seaside-checkpoint")
    tokenizer = tokenizer_with_image()
    make_config: Any = LlavaConfig
    config = make_config(
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        text_config=text_settings(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="full",
    )
    model = LlavaForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" not in name:
                value.normal_(0, max(value[0].numel(), 4) ** -0.5, generator=generator)
    model.save_pretrained(path)
    config.architectures = [SEASIDE]
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    side = VISION["image_size"]
    SiglipImageProcessorPil(size={"height": side, "width": side}, **PIXELS).save_pretrained(path)
    return path


def write_harbor(path: Path, model_class: type) -> None:
    """Write a checkpoint of Harbor's own names, which no HF model has."""
    from transformers import Blip2Config
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    tokenizer = tokenizer_with_image()
    make_config: Any = Blip2Config
    config = make_config(
        vision_config=VISION,
        qformer_config={},
        text_config=text_settings(tokenizer),
        num_query_tokens=NUM_QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
        architectures=[HARBOR],
    )
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    side = VISION["image_size"]
    BlipImageProcessorPil(size={"height": side, "width": side}, **PIXELS).save_pretrained(path)
    _, abstract = build_abstract(model_class, config, dtype=jnp.dtype(jnp.float32))
    save_file(dict(random_tensors(flatten_params(abstract))), path / "model.safetensors")


def random_tensors(leaves: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield values for a tree's parameters, which the checkpoint has by the same names."""
    rng = np.random.default_rng(0)
    for name, leaf in sorted(leaves.items()):
        scale = max(int(np.prod(leaf.shape[1:])), 4) ** -0.5
        value = rng.standard_normal(leaf.shape).astype(np.float32) * scale
        yield name, np.ones_like(value) if "norm" in name else value


# ---- the page ------------------------------------------------------------------------------------


def expected_answer(path: Path, processor: Any, prompt: Any, model_class: Any) -> tuple[int, ...]:
    """Return eight greedy tokens of one request alone."""
    config = load_model_config(str(path))
    model = PagedModel.from_directory(path, model_class, config.hf_config, max_len=64)
    return model.generate(make_sample(processor.apply(prompt, {"image": [draw(40, 30)]})), 8)


def until_eos(token_ids: tuple[int, ...], eos_token_id: int) -> list[int]:
    end = token_ids.index(eos_token_id) + 1 if eos_token_id in token_ids else len(token_ids)
    return list(token_ids[:end])


@pytest.mark.usefixtures("installed")
def test_seaside_from_the_processor_to_the_answer(
    seaside: Path, capsys: pytest.CaptureFixture[str]
):
    ask = importlib.import_module("seaside.ask").ask  # registers it
    prompt = f"<image>{QUESTION}"
    processor = mmjax.create_processor(str(seaside))
    assert "seaside.model" not in sys.modules, "a processor needs no array"
    inputs = processor.apply(prompt, {"image": [draw(40, 30)]})
    (place,) = inputs.mm_placeholders["image"]
    assert (place.offset, place.length) == (1, NUM_PATCHES)
    as_ids = processor.info.get_tokenizer().encode(prompt)
    again = processor.apply(as_ids, {"image": [draw(40, 30)]})
    assert list(again.prompt_token_ids) == list(inputs.prompt_token_ids)
    with LLM(seaside, **SETTINGS) as llm:
        answer = ask(llm, prompt, draw(40, 30))
        other = ask(llm, prompt, draw(40, 30, seed=5))
        importlib.import_module("seaside.look").look(
            llm, {"prompt": prompt, "multi_modal_data": {"image": draw(41, 30)}}
        )
    assert blocks("text")[0] == capsys.readouterr().out
    model = importlib.import_module("seaside.model").SeasideForConditionalGeneration
    expected = expected_answer(seaside, processor, prompt, model)
    assert list(answer.token_ids) == until_eos(
        expected, processor.info.get_tokenizer().eos_token_id
    )
    assert list(other.token_ids) != list(answer.token_ids), "the picture matters"


@pytest.mark.usefixtures("installed")
def test_every_block_is_a_module_that_can_be_imported(packages: Path):
    for file in sorted(packages.glob("*/*.py")):
        importlib.import_module(f"{file.parent.name}.{file.stem}")


@pytest.mark.usefixtures("installed")
def test_parity_by_the_entry_point(seaside: Path, capsys: pytest.CaptureFixture[str]):
    assert not MULTIMODAL_REGISTRY._registered
    arguments = ["--prompts", QUESTION, "--num-images", "1", "--max-tokens", "8"]
    assert run_parity([str(seaside), *arguments, "--max-len", "64"]) == 0
    # The page's figures are one machine's.
    shown, printed = (
        FIGURE.sub("#", text) for text in (blocks("text")[1], capsys.readouterr().out)
    )
    assert shown in printed


@pytest.mark.usefixtures("installed")
def test_harbor_from_the_processor_to_the_answer(tmp_path: Path):
    # The import registers it, by its decorator.
    model = importlib.import_module("harbor.model").HarborForConditionalGeneration
    write_harbor(tmp_path, model)
    processor = mmjax.create_processor(str(tmp_path))
    inputs = processor.apply(QUESTION, {"image": [draw(40, 30)]})
    (place,) = inputs.mm_placeholders["image"]
    assert (place.offset, place.length) == (0, NUM_QUERIES)
    with pytest.raises(RequestError, match="<image>"):
        processor.apply(f"<image>{QUESTION}", {"image": [draw(40, 30)]})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tmp_path, **SETTINGS) as llm:
        prompts = [
            {"prompt": QUESTION, "multi_modal_data": {"image": draw(40, 30, seed)}}
            for seed in (0, 5)
        ]
        one, two = llm.generate(prompts, params, use_tqdm=False)
    assert tuple(one.outputs[0].token_ids) == expected_answer(tmp_path, processor, QUESTION, model)
    assert one.outputs[0].token_ids != two.outputs[0].token_ids, "the picture matters"
