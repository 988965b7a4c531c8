"""How a model is found: a directory alone, mmjax's own table, this process, an entry point."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import mmjax.serve
from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import CheckpointError, ConfigError
from mmjax.models.registry import (
    MULTIMODAL_REGISTRY,
    create_processor,
    load_model_class,
    register_model,
    require_model,
    with_model_class,
)
from mmjax.processing import InputProcessingContext
from tests.families import gemma3
from tests.kit import draw
from tests.processing.test_processor import SOFT, TOKENIZER, DummyInputs, Info, Processor

ROOT = Path(__file__).parent.parent.parent
PROCESSOR = """
from tests.processing.test_processor import DummyInputs, Info, Processor
from mmjax import MULTIMODAL_REGISTRY, ProcessorFactories

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
class Outer:
    @MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=DummyInputs)
    class Inner:
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
Failing = elsewhere.failing:FACTORIES
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


def register(model: type) -> type:
    return MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=DummyInputs)(
        model
    )


class TestDecorator:
    @pytest.fixture(autouse=True)
    def registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MULTIMODAL_REGISTRY, "_registered", {})

    def test_it_marks_exactly_its_class(self, caplog: pytest.LogCaptureFixture):
        class Model:
            pass

        assert register(Model) is Model

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
        register(Model)
        assert "had a processor" in caplog.text


class TestRegistration:
    """Without an entry point: in this process."""

    @pytest.fixture(autouse=True)
    def registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MULTIMODAL_REGISTRY, "_registered", {})

    def test_the_decorator_makes_a_class_known_by_its_name(self):
        decorated = register(type("DecoratedHere", (), {}))
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
        with pytest.raises(ValueError, match="`int` is not a multimodal model"):
            MULTIMODAL_REGISTRY.register_model("Int", int)

    def test_mmjaxs_own_can_be_replaced(self, caplog: pytest.LogCaptureFixture):
        row = MULTIMODAL_REGISTRY.find_row(gemma3.ARCHITECTURE)
        assert row is not None
        assert row.folder == "gemma3"
        decorated = register(type("DecoratedHere", (), {}))
        assert not caplog.text
        register_model(gemma3.ARCHITECTURE, decorated)
        assert f"`{gemma3.ARCHITECTURE}` is registered in place of mmjax's own" in caplog.text
        assert MULTIMODAL_REGISTRY.find_row(gemma3.ARCHITECTURE) is None
        assert isinstance(create_processor(gemma3.directory()), Processor)
        assert load_model_class(gemma3.ARCHITECTURE) is decorated

    def test_another_model_of_the_same_name_is_told(self, caplog: pytest.LogCaptureFixture):
        register(type("DecoratedHere", (), {}))
        register(type("DecoratedHere", (), {}))
        assert "`DecoratedHere` was registered before" in caplog.text

    @pytest.mark.usefixtures("elsewhere")
    def test_a_path_and_its_decorator_are_one_registration(self, caplog: pytest.LogCaptureFixture):
        register_model("ItsOwnModel", "elsewhere.processor:ItsOwnModel")
        assert load_model_class("ItsOwnModel").__name__ == "ItsOwnModel"
        assert not caplog.text

    def test_a_config_says_its_settings_itself(self):
        with pytest.raises(ConfigError, match="`max_model_len` beside a ModelConfig"):
            create_processor(gemma3.model_config(), max_model_len=9)


class TestEngineProcess:
    """What the process that computes, and knows nothing of this one's registry, is told."""

    @pytest.fixture(autouse=True)
    def registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MULTIMODAL_REGISTRY, "_registered", {})

    @pytest.mark.usefixtures("elsewhere")
    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("elsewhere.processor:ItsOwnModel", "elsewhere.processor:ItsOwnModel"),
            ("elsewhere.processor:Outer.Inner", "elsewhere.processor:Outer.Inner"),
            ("elsewhere.processor:FACTORIES", "elsewhere.model:Elsewhere"),
        ],
    )
    def test_a_path_is_imported_there(
        self, path: str, expected: str, monkeypatch: pytest.MonkeyPatch
    ):
        register_model("Here", path)
        config = with_model_class(config_of("Here"))
        assert config.model_class == expected
        assert "elsewhere.model" not in sys.modules
        monkeypatch.setattr(MULTIMODAL_REGISTRY, "_registered", {})
        name = expected.rpartition(":")[2].rpartition(".")[2]
        assert load_model_class("Here", config.model_class).__name__ == name

    def test_mmjaxs_own_are_told_as_well(self):
        config = with_model_class(gemma3.model_config())
        assert config.model_class == f"mmjax.models.gemma3.model:{gemma3.ARCHITECTURE}"

    def test_a_class_of_a_function_is_refused_there_and_served_here(
        self, tiny_gemma3: Path, capsys: pytest.CaptureFixture[str]
    ):
        class Local:
            pass

        register_model(gemma3.ARCHITECTURE, register(Local))
        assert mmjax.serve.main([str(tiny_gemma3), "--port", "0"]) == 1
        said = capsys.readouterr().err
        assert "test_registry:TestEngineProcess" in said
        assert "Local`, which the engine's process cannot import" in said
        assert "defined inside of a function; define the class at the top level" in said
        assert load_model_class(gemma3.ARCHITECTURE) is Local

    def test_a_class_of_the_script_is_refused(self):
        register(type("Scripted", (), {"__module__": "__main__"}))
        with pytest.raises(ConfigError, match=r"`__main__:Scripted`.*in the script that was start"):
            with_model_class(config_of("Scripted"))

    def test_a_class_that_is_not_where_it_says_is_refused(self):
        register(type("Hidden", (), {}))
        with pytest.raises(ConfigError, match=r"`Hidden`, cannot be imported: AttributeError"):
            with_model_class(config_of("Hidden"))

    @pytest.mark.usefixtures("elsewhere")
    def test_what_is_no_class_is_refused(self):
        with pytest.raises(CheckpointError, match="is a `int`; it must be the model's class"):
            load_model_class("Here", "elsewhere.processor:NEITHER")


class TestTextModels:
    def test_they_have_no_processor(self):
        config = replace(gemma3.model_config(), architecture="LlamaForCausalLM")
        assert not MULTIMODAL_REGISTRY.supports_multimodal_inputs(config)
        with pytest.raises(ValueError, match=r"^tiny-gemma3 is not a multimodal model"):
            MULTIMODAL_REGISTRY.create_processor(config)
        named = replace(config, served_model_name=("llama",))
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
    (package / "failing.py").write_text("FACTORIES = None\nFACTORIES.info\n")
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
        with pytest.raises(CheckpointError, match="can be processed and not served"):
            require_model("ProcessorAlone")

    @pytest.mark.parametrize(
        ("architecture", "message"),
        [
            ("Neither", "is a `int`; it must be a ProcessorFactories, or a class decorated"),
            ("Undecorated", "`Undecorated` is not a multimodal model: no processor is registered"),
            ("Broken", "`elsewhere.absent:FACTORIES`, which stands for `Broken`, cannot be imp"),
            ("Failing", r"AttributeError: 'NoneType'.*elsewhere/failing\.py, line 2\)"),
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
        monkeypatch.setattr("mmjax.models.registry.entry_points", lambda **_: found)
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
        "from mmjax.models.family import FamilyDummyInputs as DummyInputs\n"
        "from mmjax.models.gemma3.processor import (\n"
        "    Gemma3MultiModalProcessor as Processor,\n"
        "    Gemma3ProcessingInfo as Info,\n"
        ")\n"
    )
    script = """
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from PIL import Image
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import require_model
from mmjax import MULTIMODAL_REGISTRY
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
