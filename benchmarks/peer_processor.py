"""vLLM's own way with a request of encoded pictures, timed; run by a Python that has vLLM.

`PEER_PYTHON benchmarks/peer_processor.py DIR PROMPT.json` reads the pictures of DIR (`*.jpg`) and
prints one JSON object of medians, in milliseconds. Started by `benchmarks.processor --peer`.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Return the median duration of `run`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def main() -> None:
    """Time decoding, an uncached request and a cached one."""
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.cache import MultiModalProcessorOnlyCache
    from vllm.multimodal.media import ImageMediaIO
    from vllm.tokenizers import cached_tokenizer_from_config

    settings = json.loads(Path(sys.argv[1]).read_text())
    encoded = [Path(path).read_bytes() for path in settings["images"]]
    prompt, num_images = settings["prompt"], len(encoded)
    config = ModelConfig(
        model=settings["model"],
        dtype="float32",
        max_model_len=settings["max_model_len"],
        limit_mm_per_prompt={"image": num_images},
    )
    tokenizer = cached_tokenizer_from_config(config)
    processor = MULTIMODAL_REGISTRY.create_processor(config, tokenizer=tokenizer)
    media_io = ImageMediaIO()
    cache: Any = MultiModalProcessorOnlyCache(config)

    def decode() -> list[Any]:
        return [media_io.load_bytes(data) for data in encoded]

    def process(images: list[Any], cache: Any) -> Any:
        items = processor.info.parse_mm_data({"image": images})
        return processor(prompt, items, cache=cache)

    decoded = decode()
    process(decoded, cache)
    repeats = settings["repeats"]
    print(
        json.dumps(
            {
                "decode": median_ms(decode, repeats),
                "uncached": median_ms(lambda: process(decode(), None), max(3, repeats // 5)),
                "cached": median_ms(lambda: process(decode(), cache), repeats),
                "cached_without_decoding": median_ms(lambda: process(decoded, cache), repeats),
            }
        )
    )


if __name__ == "__main__":
    main()
