"""What the benchmarks are fed with: JPEGs like photographs, by formula, and a model directory."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

_GOLDEN = Path(__file__).parent.parent / "tests" / "golden"


def photographs(
    number: int, width: int = 1920, height: int = 1080, *, seed: int = 0
) -> list[bytes]:
    """Return JPEGs of smooth colours under sensor noise: about 2 bits a pixel, as a camera's."""
    chooser = np.random.default_rng(seed)
    encoded = []
    for _ in range(number):
        coarse = chooser.integers(0, 256, (height // 40, width // 40, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noise = chooser.normal(0, 6, (height, width, 1))
        pixels = (np.asarray(smooth) + noise).clip(0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
        encoded.append(buffer.getvalue())
    return encoded


def write_llava(path: Path, *, side: int = 336, max_model_len: int = 8192) -> Path:
    """Write the prompt side of a LLaVA-1.5 directory (no weights) with pictures of `side`."""
    shutil.copytree(_GOLDEN / "llava", path, dirs_exist_ok=True)
    config_file, processor_file = path / "config.json", path / "processor_config.json"
    config = json.loads(config_file.read_text())
    config["vision_config"]["image_size"] = side
    config["image_seq_length"] = (side // config["vision_config"]["patch_size"]) ** 2
    config["text_config"]["max_position_embeddings"] = max_model_len
    config_file.write_text(json.dumps(config))
    tokenizer_file = path / "tokenizer_config.json"
    tokenizer = json.loads(tokenizer_file.read_text())
    tokenizer_file.write_text(json.dumps({**tokenizer, "model_max_length": max_model_len}))
    processor = json.loads(processor_file.read_text())
    processor["image_processor"]["size"] = {"shortest_edge": side}
    processor["image_processor"]["crop_size"] = {"height": side, "width": side}
    processor_file.write_text(json.dumps(processor))
    return path


def write_gemma3(path: Path, *, side: int) -> Path:
    """Write the prompt side of a Gemma 3 directory (no weights) with pictures of `side`."""
    shutil.copytree(_GOLDEN / "gemma3", path, dirs_exist_ok=True)
    config_file, processor_file = path / "config.json", path / "processor_config.json"
    config = json.loads(config_file.read_text())
    config["vision_config"]["image_size"] = side
    config_file.write_text(json.dumps(config))
    processor = json.loads(processor_file.read_text())
    processor["image_processor"]["size"] = {"height": side, "width": side}
    processor_file.write_text(json.dumps(processor))
    return path
