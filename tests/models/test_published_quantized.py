"""Checkpoints as they are published quantised: all layouts, tiny, beside their float32 numbers."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from mmjax import LLM, SamplingParams
from mmjax.convert import main as convert
from mmjax.errors import CheckpointError
from mmjax.layers.module import flatten_params
from mmjax.llm.arguments import LoRARequest
from mmjax.models.model_source import load_model_config
from mmjax.parity.arrays import PagedModel
from mmjax.parity.compare import LOGITS
from mmjax.weights.files.method import read_method
from mmjax.weights.files.safetensors import SINGLE_FILE
from mmjax.weights.load import load_params
from mmjax.weights.rules import map_tensor
from tests.families import TINY_FAMILIES, served_model
from tests.families.tiny import TinyModel
from tests.kit import tiny_gemma3_checkpoint
from tests.layers.test_quantization import ask
from tests.weights.packers import FLOAT8, FORMS, INT8, W8A8, Form, compressed_config, pack_gptq

DENSE, WITH_EXPERTS = "gemma3", "glm4v_moe"
BY_DEFAULT = [(DENSE, form) for form in ("awq", "gptq-actorder", "fp8-blocks")]
BY_DEFAULT += [(WITH_EXPERTS, "int8")]
OTHERS = [
    pytest.param(family, form, marks=pytest.mark.slow)
    for family in TINY_FAMILIES
    for form in (FORMS if family in (DENSE, WITH_EXPERTS) else ("w4a16-zeros", "gptq-actorder"))
    if (family, form) not in BY_DEFAULT
]


def is_matrix(name: str, array: np.ndarray, rules: Any) -> bool:
    """Return whether quantisers would take a tensor: a linear layer's of the language model."""
    mapped = [place for place, _ in map_tensor(name, rules)]
    return (
        name.endswith(".weight")
        and array.ndim == 2
        and bool(mapped)
        and all(place.startswith("language_model.layers.") for place in mapped)
        and not any(part in name for part in ("norm", ".gate.weight", "router", "embed"))
    )


def write_quantized(source: Path, out: Path, form: Form, rules: Any) -> dict[str, np.ndarray]:
    """Write a checkpoint in a form; return the numbers of its matrices by their names."""
    tensors: dict[str, np.ndarray] = {}
    numbers: dict[str, np.ndarray] = {}
    for name, array in load_file(source / SINGLE_FILE).items():
        if not is_matrix(name, array, rules) or not form.can_pack(array.shape):
            tensors[name] = array
            continue
        packed = form.pack(array.astype(np.float32))
        prefix = name.removesuffix("weight")
        tensors |= {prefix + last: own for last, own in packed.tensors.items()}
        numbers[name] = packed.numbers
    out.mkdir()
    write_tensors(out / SINGLE_FILE, tensors)
    return numbers


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a file that may have tensors of FP8, which safetensors' numpy does not know."""
    dtypes = {"float8_e4m3fn": "F8_E4M3"}
    plain = {
        name: np.asarray(one.view(np.uint8) if one.dtype.name in dtypes else one, order="C")
        for name, one in tensors.items()
    }
    raw = save(plain)
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for name, one in tensors.items():
        header[name]["dtype"] = dtypes.get(one.dtype.name, header[name]["dtype"])
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + raw[8 + size :])


def load_weights(path: Path, model: TinyModel) -> Any:
    """Return a directory's weights as the model's tree."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    return load_params(path, abstract, model.rules, use_tqdm=False)


@pytest.mark.parametrize(("name", "form"), [*BY_DEFAULT, *OTHERS])
def test_logits_are_those_of_the_numbers_that_the_files_stand_for(
    name: str, form: str, tmp_path: Path
):
    model = served_model(name)
    model_class, rules = model.family.model_class, model.rules
    source, quantized = tmp_path / "source", tmp_path / "quantized"
    model.reference.save_pretrained(source)
    model.family.publish_names(source)
    numbers = write_quantized(source, quantized, FORMS[form], rules)
    assert numbers
    stored = load_file(source / SINGLE_FILE)
    write_tensors(source / SINGLE_FILE, stored | numbers)
    config = deepcopy(model.config)
    # Whose programs are compiled once for all forms.
    expected = model.with_weights(load_weights(source, model))
    config.quantization_config = FORMS[form].settings
    max_len = max(256, model.family.max_model_len)
    found = PagedModel.from_directory(quantized, model_class, config, max_len=max_len)
    kept = {leaf.dtype.name for leaf in flatten_params(found.params).values()}
    assert kept & {"uint8", "int8", "float8_e4m3fn"}
    # Quantised are the decoder's weights, which a prompt of each kind goes through.
    sample = model.draw_sample(model.family.workload[0])
    one, other = (each.run(sample)[LOGITS] for each in (found, expected))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_of_biases_that_the_model_lacks_zeros_alone_are_passed_over(value: float, tmp_path: Path):
    # As the 8-bit checkpoints of Qwen2-VL have them: AutoGPTQ wrote one for every layer.
    model = served_model(DENSE)
    model.reference.save_pretrained(tmp_path / "source")
    form = FORMS["gptq"]
    write_quantized(tmp_path / "source", tmp_path / "quantized", form, model.rules)
    file = tmp_path / "quantized" / SINGLE_FILE
    tensors = load_file(file)
    for name, scales in list(tensors.items()):
        if name.endswith("down_proj.scales"):
            bias = np.full(scales.shape[1], value, np.float16)
            tensors[name.replace("scales", "bias")] = bias
    save_file(tensors, file)
    config = deepcopy(model.config)
    config.quantization_config = form.settings
    parts = (file.parent, model.family.model_class, config)
    if value:
        with pytest.raises(CheckpointError, match=r"unexpected:\n.*down_proj\.bias"):
            PagedModel.from_directory(*parts, max_len=256)
    else:
        PagedModel.from_directory(*parts, max_len=256)


def round_table(file: Path) -> None:
    """Make each row of the table of tokens 8-bit codes times a power of two, one of them 127.

    `--quantization` rounds the table, which such checkpoints leave whole: it then keeps its bits.
    """
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    table = tensors[name]
    peak = np.abs(table).max(-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(peak / 127)))
    codes = np.where(np.abs(table) == peak, np.sign(table) * 127, np.rint(table / scale))
    tensors[name] = (codes * scale).astype(table.dtype)
    save_file(tensors, file)


def test_integers_with_integer_inputs_are_as_those_that_are_made_of_floats(tmp_path: Path):
    model = served_model(DENSE)
    model_class = model.family.model_class
    model.reference.save_pretrained(tmp_path / "source")
    round_table(tmp_path / "source" / SINGLE_FILE)
    numbers = write_quantized(tmp_path / "source", tmp_path / "quantized", W8A8, model.rules)
    stored = load_file(tmp_path / "source" / SINGLE_FILE)
    write_tensors(tmp_path / "source" / SINGLE_FILE, stored | numbers)
    config = deepcopy(model.config)
    expected = PagedModel.from_directory(
        tmp_path / "source", model_class, config, max_len=256, quantization="int8"
    )
    config.quantization_config = W8A8.settings
    found = PagedModel.from_directory(tmp_path / "quantized", model_class, config, max_len=256)
    sample = model.draw_sample(model.family.workload[0])
    one, other = (each.run(sample)[LOGITS] for each in (found, expected))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole directory, quantised by GPTQ in the order of activations."""
    path = tiny_gemma3_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    form, rules = FORMS["gptq-actorder"], served_model(DENSE).rules
    write_quantized(path, path / "quantized", form, rules)
    (path / "quantized" / SINGLE_FILE).replace(path / SINGLE_FILE)
    config = json.loads((path / "config.json").read_text("utf-8"))
    written = {**config, "quantization_config": form.settings}
    (path / "config.json").write_text(json.dumps(written), "utf-8")
    return path


@pytest.mark.slow  # three engines, 24 s
def test_a_server_answers_alike_from_files_a_snapshot_and_over_devices(
    checkpoint: Path, tmp_path: Path
):
    answers = ask(checkpoint)
    assert convert([str(checkpoint), str(tmp_path / "snapshot")]) == 0
    assert ask(tmp_path / "snapshot") == answers
    assert ask(checkpoint, tensor_parallel_size=2) == answers
    with pytest.raises(CheckpointError, match=r"quantised already .*`gptq`\); leave it out"):
        ask(checkpoint, quantization="int4")


@pytest.mark.slow  # 20 s, most of it the compiling of an engine
def test_an_adapter_is_added_to_quantised_weights(checkpoint: Path, tmp_path: Path):
    layer = "model.language_model.layers.0.mlp.up_proj"
    config = load_model_config(str(checkpoint)).hf_config.get_text_config()
    rng = np.random.default_rng(0)
    shapes = {"A": (2, config.hidden_size), "B": (config.intermediate_size, 2)}
    save_file(
        {
            f"base_model.model.{layer}.lora_{part}.weight": rng.normal(size=shape).astype("float32")
            for part, shape in shapes.items()
        },
        tmp_path / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 1}
    sizes |= {"enable_lora": True, "max_lora_rank": 8}
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(checkpoint, use_tqdm_on_load=False, **sizes) as llm:
        request = LoRARequest("own", 1, str(tmp_path))
        texts = [
            llm.generate("Say something.", params, use_tqdm=False, lora_request=one)[0].outputs[0]
            for one in (None, request)
        ]
    assert texts[0].token_ids != texts[1].token_ids


def test_groups_that_kernels_do_not_know_are_refused(tmp_path: Path):
    model = served_model(DENSE)
    model.reference.save_pretrained(tmp_path / "source")
    form = FORMS["gptq"]._replace(pack=lambda weight: pack_gptq(weight, size=8))
    write_quantized(tmp_path / "source", tmp_path / "quantized", form, model.rules)
    config = deepcopy(model.config)
    config.quantization_config = form.settings
    with pytest.raises(CheckpointError, match=r"has \d+ groups of \d+ inputs; mmjax reads groups"):
        PagedModel.from_directory(
            tmp_path / "quantized", model.family.model_class, config, max_len=256
        )


def test_settings_are_found_under_the_earlier_key():
    config = deepcopy(served_model(DENSE).config)
    config.compression_config = FORMS["w8a16"].settings
    method = read_method(config)
    assert method is not None
    assert (method.name, method.bits) == ("compressed-tensors", 8)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes.*`--quantization int4`"),
        ({"quant_method": "gptq", "bits": 3}, "`quantization_config.bits` .* `3`.* 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "`marlin`"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "`gemv`"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "`weight_block_size|two sizes"),
        (
            compressed_config("float-quantized", {**FLOAT8, "strategy": "block"}),
            "config_groups.group_0.weights.block_structure` .* two sizes",
        ),
        ({"quant_method": ["fp8"]}, r"quant_method` .* `\['fp8'\]`"),
        ({**W8A8.settings, "config_groups": "one"}, "config_groups` .* `one`.* reads objects"),
        ({**W8A8.settings, "config_groups": {"a": 4}}, "config_groups.a` .* `4`"),
        ({**W8A8.settings, "sparsity_config": "2:4"}, "sparsity_config` .* `2:4`"),
        (compressed_config("nvfp4-pack-quantized", INT8), "nvfp4"),
        (compressed_config("pack-quantized", {"num_bits": 2, "type": "int"}), "2 bits"),
        ({**W8A8.settings, "sparsity_config": {"format": "sparse-24"}}, "sparse-24"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(settings: dict[str, Any], refusal: str):
    config = deepcopy(served_model(DENSE).config)
    config.quantization_config = settings
    with pytest.raises(CheckpointError, match=refusal):
        read_method(config)
