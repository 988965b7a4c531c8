"""`mmjax bench`: measure a running server, or one of the embedded default that this starts."""

import argparse
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mmjax.cli.api_client import ApiClient
from mmjax.cli.messages import to_data_url
from mmjax.errors import ConfigError

_ADDRESS = re.compile(r"mmjax serving .* at (http://\S+)")


class Sample(NamedTuple):
    """One answer; times in seconds since it was asked for."""

    first_token_s: float
    last_token_s: float
    num_prompt_tokens: int
    num_tokens: int

    @property
    def tpot_s(self) -> float:
        """Time per output token behind the first."""
        return (self.last_token_s - self.first_token_s) / max(1, self.num_tokens - 1)


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print what the requests took."""
    options = _parse(argv, prog)
    with _server(options) as url:
        client = ApiClient(url, options.api_key)
        bodies = _make_bodies(options, client.find_model())
        # Not measured: it finds nothing cached, and may wait for a compilation.
        _ask(client, bodies.pop())
        if left := client.count_programs_left():
            print(
                f"{prog}: the server has {left} programs to compile, and is slower meanwhile; "
                "measure again when `num_programs_left` of its /health is 0",
                file=sys.stderr,
            )
        start = time.perf_counter()
        with ThreadPoolExecutor(options.concurrency) as pool:
            samples = list(pool.map(lambda body: _ask(client, body), bodies))
        seconds = time.perf_counter() - start
    figures = summarize(samples, seconds)
    print(json.dumps(figures) if options.json else _table(figures))
    return 0


def summarize(samples: Sequence[Sample], seconds: float) -> dict[str, int | float]:
    """Return throughput, and percentiles of the times in milliseconds."""
    num_tokens = sum(sample.num_tokens for sample in samples)
    return {
        "requests": len(samples),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(samples) / seconds, 3),
        "prompt_tokens_per_s": round(sum(one.num_prompt_tokens for one in samples) / seconds, 1),
        "output_tokens_per_s": round(num_tokens / seconds, 1),
        **_percentiles("ttft_ms", [sample.first_token_s for sample in samples]),
        **_percentiles("tpot_ms", [sample.tpot_s for sample in samples]),
        **_percentiles("e2e_ms", [sample.last_token_s for sample in samples]),
    }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, int | float]:
    p99 = quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
    return {f"{name}_p50": round(1e3 * median(seconds), 2), f"{name}_p99": round(1e3 * p99, 2)}


def _table(figures: dict[str, int | float]) -> str:
    return "\n".join(f"{name:<22}{value:>12}" for name, value in figures.items())


def _ask(client: ApiClient, body: dict[str, Any]) -> Sample:
    start = time.perf_counter()
    first = last = 0.0
    usage: dict[str, int] = {}
    for event in client.stream_chat(body):
        usage = event.get("usage") or usage
        # The event with the role has no token.
        if any("role" not in choice["delta"] for choice in event["choices"]):
            last = time.perf_counter() - start
            first = first or last
    return Sample(first, last, usage["prompt_tokens"], usage["completion_tokens"])


def _make_bodies(options: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Return one body for each request and one more, no two with the same images."""
    draw = np.random.default_rng(options.seed)
    return [
        {
            "model": model,
            "messages": [{"role": "user", "content": _content(options, draw)}],
            "max_tokens": options.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
        for _ in range(options.num_requests + 1)
    ]


def _content(options: argparse.Namespace, draw: np.random.Generator) -> list[dict[str, Any]]:
    width, height = options.image_size
    images = []
    for _ in range(options.images):
        # Coarse noise, which JPEG compresses as it does photographs.
        pixels = draw.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((width, height)).save(buffer, "JPEG")
        url = to_data_url(buffer.getvalue(), "image/jpeg")
        images.append({"type": "image_url", "image_url": {"url": url}})
    return [*images, {"type": "text", "text": options.text}]


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    """Yield the address of the given server, or of one that lives as long as the block."""
    if options.url is not None:
        yield options.url
        return
    command = [sys.executable, "-m", "mmjax", "serve", "--port", "0", "--precompile", "all"]
    with subprocess.Popen(
        [*command, "--uvicorn-log-level", "warning"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, map(_ADDRESS.match, process.stdout)), None)
            if found is None:
                raise ConfigError("the server of the embedded default did not start")
            yield found[1]
        finally:
            process.terminate()


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add: Any = parser.add_argument
    add("--url", help="of a running server; without it, the embedded default is served")
    add("--api-key", help="of that server; else $MMJAX_API_KEY")
    add("--num-requests", type=_positive, default=32, help="(default: %(default)s)")
    add("--concurrency", type=_positive, default=4, help="requests at once (default: %(default)s)")
    add("--max-tokens", type=_positive, default=32, help="of each answer (default: %(default)s)")
    add("--images", type=_count, default=1, help="in each request (default: %(default)s)")
    add("--image-size", type=_size, default="640x480", help="WxH (default: %(default)s)")
    add("--text", default="Describe the picture.", help="of each request (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the images' pixels (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def _count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
    return int(text)


def _positive(text: str) -> int:
    return _count(text, 1)


def _size(text: str) -> tuple[int, int]:
    width, sign, height = text.partition("x")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give WxH, as in 640x480")
    return _positive(width), _positive(height)
