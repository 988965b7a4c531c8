"""How a processor is found: a directory alone, mmjax's own table, another package's entry point."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.config import MultiModalConfig
from mmjax.errors import CheckpointError, ConfigError
from mmjax.models.registry import load_model_class, require_model
from mmjax.processing import (
    MULTIMODAL_REGISTRY,
    InputProcessingContext,
    create_processor,
)
from tests.kit import draw
from tests.processing.families import gemma3
from tests.processing.test_processor import SOFT, TOKENIZER, DummyInputs, Info, Processor

ROOT = Path(__file__).parent.parent.parent
PROCESSOR = """
from tests.processing.test_processor import DummyInputs, Info, Processor
from mmjax.processing import MULTIMODAL_REGISTRY, ProcessorFactories

FACTORIES = ProcessorFactories(
    info=Info, dummy_inputs=DummyInputs, processor=Processor, model="elsewhere.model:Elsewhere"
)

@MULTIMODAL_REGISTRY.register_processor(
    Processor, info=Info, dummy_inputs=DummyInputs, model="elsewhere.model:Elsewhere"
)
class Decorated:
    pass

@MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=DummyInputs)
class ItsOwnModel:
    pass

PROCESSOR_ALONE = ProcessorFactories(info=Info, dummy_inputs=DummyInputs, processor=Processor)
NEITHER = 3
class Undecorated:
    pass
"""
ENTRY_POINTS = """
[mmjax.models]
ElsewhereForConditionalGeneration = elsewhere.processor:FACTORIES
DecoratedForConditionalGeneration = elsewhere.processor:Decorated
ItsOwnModel = elsewhere.processor:ItsOwnModel
ProcessorAlone = elsewhere.processor:PROCESSOR_ALONE
Neither = elsewhere.processor:NEITHER
Undecorated = elsewhere.processor:Undecorated
Broken = elsewhere.absent:FACTORIES
Gemma3ForConditionalGeneration = elsewhere.processor:FACTORIES
"""


class TestDirectory:
    def test_a_directory_alone_gives_a_processor(self):
        processor = create_processor(gemma3.directory())
        inputs = processor.apply("<start_of_image>?", {"image": draw(9, 9)})
        (item,) = inputs.mm_kwargs["image"]
        assert item is not None
        assert inputs.mm_placeholders["image"][0].get_num_embeds() > 0

    def test_settings_are_taken(self):
        cache, tokenizer = MultiModalProcessorOnlyCache(0), create_processor().info.get_tokenizer()
        processor = create_processor(
            str(gemma3.directory()),
            tokenizer=tokenizer,
            cache=cache,
            max_model_len=77,
            limit_mm_per_prompt={"image": 3},
        )
        assert processor.cache is cache
        assert processor.info.get_tokenizer() is tokenizer
        assert processor.info.allowed_mm_limits == {"image": 3}
        assert processor.info.ctx.model_config.max_model_len == 77

    def test_what_is_no_checkpoint_is_named(self, tmp_path: Path):
        with pytest.raises(CheckpointError, match=r"has no config\.json"):
            create_processor(tmp_path)


class TestDecorator:
    def register(self, model: type) -> type:
        return MULTIMODAL_REGISTRY.register_processor(
            Processor, info=Info, dummy_inputs=DummyInputs
        )(model)

    def test_it_marks_exactly_its_class(self, caplog: pytest.LogCaptureFixture):
        class Model:
            pass

        assert self.register(Model) is Model

        class Derived(Model):
            pass

        with pytest.raises(ValueError, match="`Derived` is not a multimodal model"):
            MULTIMODAL_REGISTRY.get_factories(Derived)
        factories = MULTIMODAL_REGISTRY.get_factories(Model)
        without = InputProcessingContext(model_config=gemma3.model_config(), tokenizer=None)
        with pytest.raises(ValueError, match="Processor works with text, and there is no tokeniz"):
            factories.build_processor(without)
        processor = factories.build_processor(replace(without, tokenizer=TOKENIZER))
        assert isinstance(processor, Processor)
        assert processor.dummy_inputs.info is processor.info
        assert not caplog.text
        self.register(Model)
        assert "had a processor" in caplog.text


class TestRegistration:
    """Without an entry point: in this process."""

    @pytest.fixture(autouse=True)
    def registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MULTIMODAL_REGISTRY, "_registered", {})

    def test_the_decorator_makes_a_class_known_by_its_name(self):
        decorate = MULTIMODAL_REGISTRY.register_processor(
            Processor, info=Info, dummy_inputs=DummyInputs
        )
        decorated = decorate(type("DecoratedHere", (), {}))
        processor = MULTIMODAL_REGISTRY.create_processor(config_of("DecoratedHere"))
        assert isinstance(processor, Processor)
        MULTIMODAL_REGISTRY.register_model("OtherName", decorated)
        assert isinstance(MULTIMODAL_REGISTRY.create_processor(config_of("OtherName")), Processor)

    @pytest.mark.usefixtures("elsewhere")
    def test_an_import_path_is_imported_when_it_is_asked_for(self):
        MULTIMODAL_REGISTRY.register_model("ByPath", "elsewhere.processor:FACTORIES")
        assert "elsewhere.processor" not in sys.modules
        assert load_model_class("ByPath").__name__ == "Elsewhere"

    def test_what_cannot_be_registered_is_named(self):
        with pytest.raises(ConfigError, match="'elsewhere'; give a class, or its import path"):
            MULTIMODAL_REGISTRY.register_model("ByPath", "elsewhere")
        with pytest.raises(ConfigError, match=r"`Gemma3.*` is mmjax's own and cannot be replaced"):
            MULTIMODAL_REGISTRY.register_model("Gemma3ForConditionalGeneration", "a:b")
        with pytest.raises(ValueError, match="`int` is not a multimodal model"):
            MULTIMODAL_REGISTRY.register_model("Int", int)


class TestTextModels:
    def test_they_have_no_processor(self):
        config = replace(gemma3.model_config(), architecture="LlamaForCausalLM")
        assert not MULTIMODAL_REGISTRY.supports_multimodal_inputs(config)
        with pytest.raises(ValueError, match=r"^tiny-gemma3 is not a multimodal model"):
            MULTIMODAL_REGISTRY.create_processor(config)
        named = replace(config, served_model_name="llama")
        with pytest.raises(ValueError, match=r"^llama is not a multimodal model"):
            MULTIMODAL_REGISTRY.create_processor(named)

    @pytest.mark.parametrize(
        ("mm", "expected"),
        [
            ({}, True),
            ({"limit_mm_per_prompt": {"image": 1}}, True),
            ({"limit_mm_per_prompt": {"image": 0}}, False),
            ({"limit_mm_per_prompt": {"image": 0}, "enable_mm_embeds": True}, True),
        ],
    )
    def test_all_limits_of_0_make_one(self, mm: dict[str, Any], expected: bool):
        config = replace(gemma3.model_config(), mm=MultiModalConfig(**mm))
        assert MULTIMODAL_REGISTRY.supports_multimodal_inputs(config) is expected


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a distribution with models of its own, as pip leaves one."""
    package, info = tmp_path / "elsewhere", tmp_path / "elsewhere-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "processor.py").write_text(PROCESSOR)
    (package / "model.py").write_text("import jax\nclass Elsewhere:\n    pass\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(MULTIMODAL_REGISTRY, "_by_entry_point", {})
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "elsewhere"]:
        del sys.modules[name]


def config_of(architecture: str) -> Any:
    return replace(gemma3.model_config(), architecture=architecture)


@pytest.mark.usefixtures("elsewhere")
class TestOtherPackages:
    @pytest.mark.parametrize(
        "architecture", ["ElsewhereForConditionalGeneration", "DecoratedForConditionalGeneration"]
    )
    def test_an_entry_point_gives_both_halves(self, architecture: str):
        processor = MULTIMODAL_REGISTRY.create_processor(config_of(architecture))
        inputs = processor.apply("[img]", {"image": draw(3, 2)})
        assert inputs.prompt_token_ids.count(SOFT) == 2
        assert "elsewhere.model" not in sys.modules
        assert MULTIMODAL_REGISTRY.supports_multimodal_inputs(config_of(architecture))
        require_model(architecture)
        assert load_model_class(architecture).__name__ == "Elsewhere"

    def test_the_decorated_class_is_the_model_itself(self):
        assert load_model_class("ItsOwnModel").__name__ == "ItsOwnModel"

    def test_a_processor_alone_is_not_served(self):
        MULTIMODAL_REGISTRY.create_processor(config_of("ProcessorAlone"))
        with pytest.raises(CheckpointError, match="can be processed but not served yet"):
            require_model("ProcessorAlone")

    @pytest.mark.parametrize(
        ("architecture", "message"),
        [
            ("Neither", "is a `int`; it must be a ProcessorFactories, or a class decorated"),
            ("Undecorated", "`Undecorated` is not a multimodal model: no processor is registered"),
            ("Broken", "cannot be loaded from `elsewhere.absent:FACTORIES`: ModuleNotFoundError"),
        ],
    )
    def test_a_wrong_entry_point_is_named(self, architecture: str, message: str):
        with pytest.raises(CheckpointError, match=message):
            MULTIMODAL_REGISTRY.create_processor(config_of(architecture))

    def test_they_cannot_replace_our_own(self):
        factories = MULTIMODAL_REGISTRY.find_factories("Gemma3ForConditionalGeneration")
        assert factories is not None
        assert factories.info is not Info

    def test_the_first_of_two_is_taken(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        objects = ["FACTORIES", "PROCESSOR_ALONE"]
        found = [
            EntryPoint("Two", f"elsewhere.processor:{name}", "mmjax.models") for name in objects
        ]
        monkeypatch.setattr("mmjax.processing.registry.entry_points", lambda **_: found)
        factories = MULTIMODAL_REGISTRY.find_factories("Two")
        assert factories is not None
        assert factories.model == "elsewhere.model:Elsewhere"
        assert "`Two` is offered by" in caplog.text


def test_p0_imports_no_jax_for_another_packages_processor(elsewhere: Path):
    processor = (elsewhere / "elsewhere" / "processor.py").read_text()
    # The tests' own kit loads jax: this processor stands on mmjax alone.
    (elsewhere / "elsewhere" / "processor.py").write_text(
        processor.replace("tests.processing.test_processor", "elsewhere.family")
    )
    (elsewhere / "elsewhere" / "family.py").write_text(
        "from mmjax.models.gemma3.processor import (\n"
        "    Gemma3DummyInputsBuilder as DummyInputs,\n"
        "    Gemma3MultiModalProcessor as Processor,\n"
        "    Gemma3ProcessingInfo as Info,\n"
        ")\n"
    )
    script = """
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from PIL import Image
from mmjax.model_source import load_model_config
from mmjax.models.registry import require_model
from mmjax.processing import MULTIMODAL_REGISTRY
config = replace(load_model_config(sys.argv[1]), architecture="ElsewhereForConditionalGeneration")
require_model(config.architecture)
processor = MULTIMODAL_REGISTRY.create_processor(config)
inputs = processor.apply("<start_of_image>", {"image": Image.new("RGB", (9, 9))})
print(len(inputs.mm_placeholders["image"]))
print(sorted({"jax", "flax", "elsewhere.model"} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(gemma3.directory())],
        cwd=ROOT,
        env={"PYTHONPATH": f"{elsewhere}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "[]"]
