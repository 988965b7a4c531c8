"""Whole prompts, text and pictures in, tokens out: our processor and arrays against HF's."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from mmjax import LLM
from mmjax.errors import ConfigError
from mmjax.models.model_source import load_model_config
from mmjax.params.sampling_params import SamplingParams
from mmjax.parity import reference
from mmjax.parity.__main__ import main
from mmjax.parity.case import Case, Parity
from mmjax.parity.reference import generate_reference, load_reference_processor
from tests.families import FAMILIES
from tests.kit import draw, random_image_prompt, tiny_gemma3_checkpoint

PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 32,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SIZES: dict[str, Sequence[tuple[int, int]]] = {
    "no picture": (),
    "1x1": ((1, 1),),
    "37x211": ((37, 211),),
    "640x480": ((640, 480),),
    "two": ((211, 37), (56, 56)),
    "three": ((640, 480), (1, 1), (37, 211)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 of three layers."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return tiny_gemma3_checkpoint(
        tmp_path_factory.mktemp("parity"), text={"num_hidden_layers": 3, "layer_types": kinds}
    )


@pytest.fixture(scope="module")
def parity(checkpoint: Path) -> Parity:
    """The checkpoint on both sides."""
    return Parity(load_model_config(str(checkpoint)), max_len=320)


WITH_HFS_PARTS = {
    *("blip2", "blip2_t5", "chameleon", "florence2", "gemma3", "llava", "llava siglip"),
    "paligemma",
}
"""Others have an image processor of mmjax's own, or no file that says how HF's is made."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in {*WITH_HFS_PARTS, "pixtral"} else pytest.mark.slow)
        for n in FAMILIES
    ],
)
def test_hfs_own_processor_is_asked_where_its_parts_are_hfs(name: str):
    family = FAMILIES[name]
    ours = family.make_processor()
    path, hf_config = ours.info.ctx.model_config.path, ours.info.get_hf_config()
    found: Any = load_reference_processor(path, hf_config.model_type, ours.info.get_hf_processor())
    assert (found is not None) == (name in WITH_HFS_PARTS)
    if found is None:
        return
    assert type(found).__name__.lower() == f"{family.folder}processor"
    prompt, image = f"{family.placeholder} what", draw(90, 70)
    if family.updates_encoder_prompt:
        prompt = family.question
    hf = found(text=[prompt], images=[image], return_tensors="np")
    inputs = ours.apply(prompt, {"image": image})
    assert family.prompt_ids(inputs) == hf["input_ids"][0].tolist()


def test_a_text_alone_is_compared_where_hfs_processor_refuses_it():
    config = load_model_config(str(FAMILIES["paligemma"].checkpoint))
    report = Parity(config, max_len=64).run(Case(name="text", prompt="what is it"), max_tokens=8)
    assert report.is_within(1e-4)
    assert report.token_ids == report.reference_token_ids


def make_case(name: str, mm_processor_kwargs: Any = None, *, as_ids: Any = None) -> Case:
    sizes = SIZES[name]
    prompt = random_image_prompt(len(sizes), len(sizes))
    return Case(
        name=name,
        prompt=as_ids(prompt) if as_ids else prompt,
        images=[draw(*size, seed) for seed, size in enumerate(sizes)],
        mm_processor_kwargs=mm_processor_kwargs,
    )


@pytest.mark.parametrize("name", SIZES)
def test_text_prompts(parity: Parity, name: str):
    report = parity.run(make_case(name))
    assert report.is_within(2e-5), report


@pytest.mark.parametrize("name", ["37x211", "640x480", "three"])
def test_pan_and_scan(parity: Parity, name: str):
    case = make_case(name, PAN_AND_SCAN)
    items = parity.process(case).items
    assert sum(len(item.tensors["pixel_values"]) for item in items) > len(case.images)
    report = parity.run(case)
    assert report.is_within(2e-5), report


@pytest.mark.parametrize("kwargs", [None, PAN_AND_SCAN], ids=["whole", "pan and scan"])
def test_token_prompts(parity: Parity, kwargs: Any):
    tokenizer: Any = parity.processor.info.get_tokenizer()
    case = make_case("three", kwargs, as_ids=tokenizer.encode)
    text = make_case("three", kwargs)
    assert not isinstance(case.prompt, str)
    assert parity.process(case).token_ids.tolist() == parity.process(text).token_ids.tolist()
    # HF takes text only, and so is asked with the text.
    assert parity.ours.generate(parity.process(case), 4) == parity.run(text).token_ids[:4]


def test_the_engine_says_what_hf_says(checkpoint: Path, parity: Parity):
    """All cases at once through `LLM`: batched, bucketed, cached, and the same 32 tokens."""
    cases = [make_case(name) for name in SIZES]
    cases += [make_case(name, PAN_AND_SCAN) for name in ("640x480", "three")]
    prompts: list[Any] = [
        {
            "prompt": case.prompt,
            "multi_modal_data": {"image": list(case.images)} if case.images else {},
            "mm_processor_kwargs": dict(case.mm_processor_kwargs or {}),
        }
        for case in cases
    ]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLM(
        checkpoint,
        max_model_len=320,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        use_tqdm_on_load=False,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        inputs = parity.process_reference(case)
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist(), case.name
        tokens = generate_reference(parity.reference, inputs, 32)
        assert tuple(output.outputs[0].token_ids) == tokens, case.name


def test_a_wrong_weight_is_found_where_it_lies(checkpoint: Path):
    parity = Parity(load_model_config(str(checkpoint)), max_len=320)
    layers = parity.ours.params["language_model"]["layers"]
    layers[1] = jax.tree.map(lambda leaf: leaf * 1.01, layers[1])
    report = parity.run(make_case("1x1"), max_tokens=1)
    first = report.first_out_of(1e-4)
    assert first is not None
    assert first.name == "language_model.layers.1"


def test_the_command_says_yes(checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--prompts", "Which?", "--num-images", "1", "--max-tokens", "2"]
    assert main([str(checkpoint), *arguments]) == 0
    out = capsys.readouterr().out
    assert "language_model.layers.2" in out
    assert out.endswith("parity: yes (tolerance 0.0001)\n")


def test_the_command_says_what_bfloat16_changes(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--prompts", "Which?", "--num-images", "1", "--max-tokens", "8"]
    assert main([str(checkpoint), *arguments, "--dtype", "bfloat16"]) == 0
    *_, row, result = capsys.readouterr().out.splitlines()
    ours, _, reference, _, peak = (float(cell) for cell in row.split()[3:8])
    assert 0 < ours < 0.1 * peak
    assert 0.2 < ours / reference < 5, "as far from float32 as torch's own bfloat16"
    assert result == "greedy tokens: as sure"


def test_the_command_says_what_eight_bits_change(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--prompts", "Which?", "--num-images", "1", "--max-tokens", "8"]
    status = main([str(checkpoint), *arguments, "--quantization", "int8"])
    *_, row, result = capsys.readouterr().out.splitlines()
    ours, _, reference, _, peak = (float(cell) for cell in row.split()[3:8])
    assert 0 < ours < 0.2 * peak
    assert reference == 0, "HF's weights stay whole"
    assert status == (result != "greedy tokens: as sure")


def test_the_command_says_no(checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--prompts", "Which?", "--num-images", "0", "--max-tokens", "1"]
    assert main([str(checkpoint), *arguments, "--tolerance", "0", "--summary-only"]) == 1
    assert "parity: NO" in capsys.readouterr().out


def test_a_prompt_that_is_too_long_is_no_difference(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--prompts", "Which?", "--num-images", "2", "--max-tokens", "8"]
    assert main([str(checkpoint), *arguments, "--max-len", "32"]) == 2
    assert "tokens, and `--max-len` is 32; give" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("caps", "explaining"),
    [
        # One cap alone is the last row's, where the other one changes nothing.
        pytest.param(
            {"final_logit_softcapping": 5.0},
            "`final_logit_softcapping` to 5.0",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"attn_logit_softcapping": 0.1},
            "`attn_logit_softcapping` to 0.1",
            marks=pytest.mark.slow,
        ),
        (
            {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 0.1},
            "`final_logit_softcapping` to 5.0 and `attn_logit_softcapping` to 0.1",
        ),
        (
            {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 1e9},
            "`final_logit_softcapping` to 5.0",
        ),
    ],
)
def test_the_command_names_what_explains_a_difference(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caps: dict[str, float],
    explaining: str,
):
    capped = tiny_gemma3_checkpoint(tmp_path, text=caps)
    arguments = ["--prompts", "Which?", "--num-images", "1", "--max-tokens", "2"]
    assert main([str(capped), *arguments, "--summary-only"]) == 1
    result, note = capsys.readouterr().out.splitlines()[-2:]
    assert result.startswith("parity: NO")
    assert note.startswith(f"note: config.json sets {explaining}: mmjax obeys")
    assert "explains 'Which?' + 1: within tolerance" in note


def test_a_difference_that_the_caps_do_not_explain_has_no_note(tmp_path: Path):
    caps = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 0.1}
    capped = tiny_gemma3_checkpoint(tmp_path, text=caps)
    parity = Parity(load_model_config(str(capped)), max_len=320)
    layers = parity.ours.params["language_model"]["layers"]
    layers[1] = jax.tree.map(lambda leaf: leaf * 1.01, layers[1])
    case = make_case("no picture")
    assert parity.explain(case, parity.run(case, max_tokens=1), 1e-4) == {}


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("--num-images", "-1", "-1 is not a number of at least 0"),
        ("--max-tokens", "0", "0 is not a number of at least 1"),
        ("--mm-processor-kwargs", "[1]", "[1] is not a JSON object"),
    ],
)
def test_the_command_refuses_wrong_arguments(
    argument: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main(["./nowhere", argument, value])
    assert words in capsys.readouterr().err


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]):
    assert main(["./nowhere"]) == 2
    assert "parity: model directory `./nowhere` does not exist" in capsys.readouterr().err


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'mmjax\[parity\]'"):
        reference.import_torch()


def test_an_architecture_that_transformers_lacks_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="none for `Elsewhere`, nor for the `model_type` `llama`"):
        reference.load_reference(tmp_path, "Elsewhere")
