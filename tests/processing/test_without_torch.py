"""Processing needs neither torch nor jax: a fresh interpreter in which both cannot be imported."""

import subprocess
import sys
from pathlib import Path

from tests.processing.families import gemma3

SCRIPT = """
import sys
for name in ("torch", "torchvision", "jax", "jaxlib", "flax"):
    sys.modules[name] = None  # importing it raises ImportError
from pathlib import Path
from PIL import Image
from transformers import AutoConfig
from mmjax.cache.processor_cache import MultiModalProcessorOnlyCache
from mmjax.config import ModelConfig
from mmjax.models.registry import create_processor

path = Path(sys.argv[1])
config = ModelConfig(
    model="tiny",
    path=path,
    hf_config=AutoConfig.from_pretrained(path),
    architecture="Gemma3ForConditionalGeneration",
    max_model_len=1024,
)
for cache in (None, MultiModalProcessorOnlyCache(2**24)):
    processor = create_processor(config, cache=cache)
    inputs = processor.apply(
        "<start_of_image> and <start_of_image>?",
        {"image": [Image.new("RGB", (640, 300)), Image.new("RGBA", (3, 5))]},
        hf_processor_mm_kwargs={"do_pan_and_scan": True},
    )
    print([placeholder.get_num_embeds() for placeholder in inputs.mm_placeholders["image"]])
"""


def test_gemma3_is_processed_without_torch_and_jax():
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(gemma3.directory())],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[12, 4]", "[12, 4]"]
