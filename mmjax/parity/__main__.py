"""`python -m mmjax.parity [MODEL]`: compare a model with HF's, layer by layer.

Runs a checkpoint in float32 with mmjax and HF, and prints each module's difference. With
`--dtype bfloat16` or `--quantization int8` it prints how far each of the two is then from its own
float32 run.

What rounding to a dtype changes: mmjax's and HF's logits beside those of their float32 runs.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
from PIL import Image

from mmjax.config.engine_config import ModelConfig, Quantization
from mmjax.errors import ConfigError, MMJaxError
from mmjax.models.model_source import load_model_config, resolve_adapter
from mmjax.models.registry import load_model_class
from mmjax.parity.arrays import PagedModel
from mmjax.parity.case import DEFAULT_MAX_TOKENS, Case, Parity
from mmjax.parity.compare import (
    LOGITS,
    TOLERANCE,
    CaseReport,
    Difference,
    format_case,
    format_summary,
    measure,
)
from mmjax.parity.departures import describe
from mmjax.parity.reference import import_torch, load_reference, run_reference_logits

SURE_GAP = 0.05
"""Between float32's two highest logits: a smaller one may be turned over by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedReport:
    """The comparison of one prompt."""

    name: str
    ours: Difference
    """How far mmjax's logits at all prompt positions are from its float32 run."""
    reference: Difference
    """How far HF's are from its float32 run."""
    num_sure: int
    """Greedy tokens of the float32 run before the first whose gap is below `SURE_GAP`."""
    num_same: int
    """Greedy tokens that are the same in both dtypes, from the first on."""

    @property
    def is_good(self) -> bool:
        """Return whether all tokens are the same that rounding cannot turn over."""
        return self.num_same >= self.num_sure


class RoundedParity:
    """A checkpoint loaded by mmjax and by HF, in float32 and in another dtype."""

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        dtype: str,
        quantization: Quantization | None = None,
        max_len: int,
    ) -> None:
        """`quantization`: of mmjax's weights; HF's stay whole."""
        self.exact = Parity(model_config, max_len=max_len)
        self.ours = PagedModel.from_directory(
            model_config.path,
            load_model_class(model_config.architecture),
            model_config.hf_config,
            max_len=max_len,
            dtype=jnp.dtype(dtype),
            quantization=quantization,
        )
        self.reference = load_reference(model_config.path, model_config.architecture, dtype)

    def run(self, case: Case, *, max_tokens: int) -> RoundedReport:
        """Run all four models; raises as `Parity.check`."""
        sample = self.exact.check(case, max_tokens)
        inputs: Any = self.exact.process_reference(case)
        exact, rounded = (
            run_reference_logits(model, inputs) for model in (self.exact.reference, self.reference)
        )
        logits = self.exact.ours.decode(sample, max_tokens)
        second, first = np.sort(logits, axis=1)[:, -2:].T
        is_sure = first - second >= SURE_GAP
        is_same = logits.argmax(1) == self.ours.decode(sample, max_tokens).argmax(1)
        return RoundedReport(
            name=case.name,
            ours=measure(
                LOGITS, self.ours.run(sample)[LOGITS], self.exact.ours.run(sample)[LOGITS]
            ),
            reference=measure(LOGITS, rounded, exact),
            num_sure=_count_leading(is_sure),
            num_same=_count_leading(is_same),
        )


def _count_leading(flags: np.ndarray) -> int:
    return int(np.logical_and.accumulate(flags).sum())


def format_rounded(reports: Sequence[RoundedReport], dtype: str) -> str:
    """Return a line per case, and the result."""
    width = max(len(report.name) for report in reports)
    lines = [
        f"logits in {dtype} beside those in float32; greedy tokens the same, and those that a gap "
        f"of {SURE_GAP:g} makes sure",
        f"{'case':<{width}}  {'mmjax max':>9}  {'mean':>9}  {'HF max':>9}  {'mean':>9}"
        f"  {'peak':>9}  {'same':>4}  {'sure':>4}",
    ]
    lines += [
        f"{report.name:<{width}}  {report.ours.max_abs:9.2e}  {report.ours.mean_abs:9.2e}"
        f"  {report.reference.max_abs:9.2e}  {report.reference.mean_abs:9.2e}"
        f"  {report.ours.peak:9.2e}  {report.num_same:4}  {report.num_sure:4}"
        for report in reports
    ]
    is_good = all(report.is_good for report in reports)
    return "\n".join([*lines, f"greedy tokens: {'as sure' if is_good else 'NOT as sure'}"])


NUM_IMAGES = (0, 1, 2, 3)
PROMPTS = ("Describe the picture.", "What color is the circle?")
NUM_CLIPS = (1, 2)
LENGTHS = (1.2345, 7.7777)
"""Seconds of a case's clips."""
SIZES = ((640, 480), (37, 211), (1, 1))
"""Sizes (width, height) of a case's images, which are the first n of these."""


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m mmjax.parity") -> int:
    """Print a table per case and a summary; return 0, 1 out of tolerance, or 2 if it cannot run."""
    options = _parse(arguments, prog)
    try:
        import_torch()
        return _run(options)
    except MMJaxError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    model_config = load_model_config(
        options.model, revision=options.revision, dtype="float32", needs_weights=True
    )
    is_rounded = options.dtype != "float32" or options.quantization is not None
    if is_rounded and options.lora is not None:
        raise ConfigError("`--lora` is compared in float32; leave `--dtype`, `--quantization` out")
    if is_rounded:
        rounded = RoundedParity(
            model_config,
            dtype=options.dtype,
            quantization=options.quantization,
            max_len=options.max_len,
        )
        rounded_reports = [
            rounded.run(case, max_tokens=options.max_tokens)
            for case in _make_cases(options, rounded.exact)
        ]
        kind = " and ".join(filter(None, (options.dtype, options.quantization)))
        print(format_rounded(rounded_reports, kind))
        return 0 if all(report.is_good for report in rounded_reports) else 1
    adapter = None if options.lora is None else resolve_adapter(options.lora)
    parity = Parity(model_config, max_len=options.max_len, adapter=adapter)
    reports: list[CaseReport] = []
    explained: list[tuple[str, dict[str, Any]]] = []
    for case in _make_cases(options, parity):
        reports.append(parity.run(case, max_tokens=options.max_tokens))
        if not options.summary_only:
            print(format_case(reports[-1], options.tolerance), end="\n\n", flush=True)
        explained.append((case.name, parity.explain(case, reports[-1], options.tolerance)))
    print(format_summary(reports, options.tolerance, describe(explained, parity.reference)))
    return 0 if all(report.is_within(options.tolerance) for report in reports) else 1


def _make_cases(options: argparse.Namespace, parity: Parity) -> Iterator[Case]:
    kwargs = options.mm_processor_kwargs
    for text in options.prompts:
        for num_images in _count_images(options, parity):
            yield Case(
                name=f"{text!r} + {num_images}",
                prompt=parity.write_prompt(text, num_images),
                images=[_draw(*SIZES[i % len(SIZES)], i) for i in range(num_images)],
                mm_processor_kwargs=kwargs,
            )
        if parity.takes_videos:
            yield Case(
                name=f"{text!r} + a video",
                prompt=parity.write_prompt(text, 0, num_videos=1),
                videos=[_draw_video()],
                mm_processor_kwargs=kwargs,
            )
        for num_clips in filter(parity.takes_clips, NUM_CLIPS):
            yield Case(
                name=f"{text!r} + {num_clips} clips",
                prompt=parity.write_prompt(text, 0, num_clips=num_clips),
                clips=[_draw_clip(i, parity) for i in range(num_clips)],
                mm_processor_kwargs=kwargs,
            )


def _count_images(options: argparse.Namespace, parity: Parity) -> Sequence[int]:
    return options.num_images or [n for n in NUM_IMAGES if parity.takes_images(n)]


def _draw_clip(seed: int, parity: Parity) -> np.ndarray:
    """Return float32[T]: a tone that grows higher, by the seed, of a length that is no round one.

    No longer than the model hears at once.
    """
    info = parity.processor.info
    longest, _ = info.find_longest_clip({"audio": 1})
    length = min(longest, int(LENGTHS[seed % len(LENGTHS)] * (info.audio_rate or 0)))
    time = np.arange(length) / (info.audio_rate or 1)
    return np.sin(2 * np.pi * (200 + 90 * seed + 300 * time) * time).astype(np.float32) / 2


def _parse(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add: Any = parser.add_argument
    add("model", nargs="?", help="a directory or a hub id; without it, the embedded default")
    add("--revision", help="of a hub id")
    add("--prompts", nargs="+", default=PROMPTS, help="texts to ask with every set of pictures")
    add("--num-images", nargs="+", type=_count, help="sizes of those sets; up to 3 without it")
    add("--mm-processor-kwargs", type=_object, help='as JSON: {"do_pan_and_scan": true}')
    add("--lora", metavar="DIR", help="an adapter that both compute with: a directory or hub id")
    add("--max-tokens", type=_positive, default=DEFAULT_MAX_TOKENS, help="greedy tokens to compare")
    add("--max-len", type=int, default=4096, help="room for a prompt and its greedy tokens")
    add("--tolerance", type=float, default=TOLERANCE, help="on logits, absolute")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    add("--quantization", choices=get_args(Quantization), help="of mmjax's weights")
    add("--summary-only", action="store_true", help="leave out the tables")
    return parser.parse_args(arguments)


def _count(text: str, least: int = 0) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is not a number of at least {least}")
    return number


def _positive(text: str) -> int:
    return _count(text, 1)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def _draw(width: int, height: int, seed: int) -> Image.Image:
    """Return an image of coloured stripes, by the seed."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(0.05 * (k + 1) * x + 0.07 * (seed + 1) * y + k) for k in range(3)]
    return Image.fromarray(((np.stack(waves, -1) + 1) * 127.5).astype(np.uint8))


def _draw_video() -> tuple[np.ndarray, dict[str, Any]]:
    """Return a video of three frames, of ten seconds' thirty, with its metadata."""
    frames = np.stack([np.asarray(_draw(64, 48, seed)) for seed in range(3)])
    return frames, {"fps": 3.0, "total_num_frames": 30, "frames_indices": [0, 14, 29]}


if __name__ == "__main__":
    sys.exit(main())
