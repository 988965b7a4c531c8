"""What the processing layer, its caches and the bridge cost, each beside a yardstick of this run.

`python -m benchmarks.processor [--peer PYTHON] [--repeats 25]` prints one line for each figure.
`PYTHON` is an interpreter that has vLLM (its CPU build will do): its own processor then gets the
same pictures in the same run.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from blake3 import blake3
from PIL import Image

from benchmarks.bridge import measure_bridge, measure_shm
from benchmarks.pictures import photographs, write_gemma3, write_llava
from mmjax import create_processor
from mmjax.cache import MultiModalProcessorOnlyCache
from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.limits import MediaLimits
from mmjax.processing import (
    MultiModalHasher,
    PromptReplacement,
    PromptUpdateDetails,
    apply_token_matches,
    find_mm_placeholders,
)
from mmjax.processing.media.decode import MediaWithBytes
from mmjax.processing.media.encoded import EncodedImage

NUM_IMAGES = 8
_SIDE = 896
"""Of Gemma 3's images, in pixels."""
PROMPT = "USER: " + "<image>" * NUM_IMAGES + " what is it? ASSISTANT:"


def compare(
    programs: dict[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Run programs in turn, `repeats` times; return each one's median in seconds of `clock`."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, run in programs.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_images(repeats: int) -> Iterator[str]:
    """Process one JPEG and two beside what Pillow takes to decode and to resize one.

    Decoded by threads, as for `LLM`, and by processes, as for the server. Processor time, of all
    processes, says more than time where others use the machine.
    """
    workers = DecodeWorkers(2, timeout_s=60.0, memory_bytes=2**30)
    with tempfile.TemporaryDirectory() as folder, closing(workers):
        processor = create_processor(write_gemma3(Path(folder) / "gemma3", side=_SIDE))
        one, two = photographs(2)

        def resize() -> Image.Image:
            return Image.open(io.BytesIO(one)).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)

        def process(*pictures: bytes, apart: bool = False) -> object:
            text = "<start_of_image>" * len(pictures)
            by = workers if apart else None
            images = [EncodedImage(picture, MediaLimits(), workers=by) for picture in pictures]
            return processor.apply(text, {"image": images})

        def processor_time() -> float:
            pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            others = [Path(f"/proc/{pid}/schedstat").read_text().split()[0] for pid in pids]
            return time.process_time() + sum(map(int, others)) / 1e9

        runs = {
            "Pillow": resize,
            "threads": lambda: process(one),
            "threads, two": lambda: process(one, two),
            "processes": lambda: process(one, apart=True),
            "processes, two": lambda: process(one, two, apart=True),
        }
        compare(runs, 2)
        seconds = compare(runs, repeats)
        used = compare(runs, repeats, clock=processor_time)
        pillow = seconds["Pillow"]
        for name in ("threads", "processes"):
            single, double = seconds[name], seconds[f"{name}, two"]
            yield (
                f"a JPEG of 1920x1080 to {_SIDE}x{_SIDE}, decoded by {name}: Pillow "
                f"{pillow * 1e3:.1f} ms, a request {single * 1e3:.1f} ms, {single / pillow:.2f}x "
                f"(ceiling 1.15), {used[name] / used['Pillow']:.2f}x the processor time; of two "
                f"{double * 1e3:.1f} ms, {double / single:.2f}x (ceiling 1.1 on two cores)"
            )


def measure_hashing(picture: bytes, repeats: int) -> Iterator[str]:
    """Hash an encoded picture as an item, and its bytes alone."""
    media = MediaWithBytes(Image.new("RGB", (1, 1)), picture)
    hasher = MultiModalHasher("blake3")
    seconds = compare(
        {
            "raw": lambda: blake3(picture).hexdigest(),
            "item": lambda: hasher.hash_kwargs(model_id="llava", image=media),
        },
        repeats * 20,
    )
    share = seconds["raw"] / seconds["item"]
    rate = len(picture) / seconds["item"] / 1e9
    yield (
        f"hashing {len(picture)} encoded bytes: {rate:.2f} GB/s, "
        f"{share:.2f}x raw blake3 (floor 0.9)"
    )


def measure_requests(pictures: Sequence[bytes], repeats: int, peer: Path | None) -> Iterator[str]:
    """Process a request of eight pictures: unknown, known, and as the peer does it."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_llava(Path(folder) / "llava")
        request = {"image": list(pictures)}
        cold = create_processor(model)
        warm = create_processor(model, cache=MultiModalProcessorOnlyCache(2**30))
        warm.apply(PROMPT, request)
        uncached = compare({"uncached": lambda: cold.apply(PROMPT, request)}, max(5, repeats // 5))
        cached = compare({"cached": lambda: warm.apply(PROMPT, request)}, repeats * 4)
        ours, first = cached["cached"] * 1e3, uncached["uncached"] * 1e3
        yield (
            f"8 JPEGs of 1920x1080, unknown: {first:.1f} ms; known: {ours:.2f} ms, "
            f"{first / ours:.0f}x faster (floor 100)"
        )
        if peer is not None:
            theirs = run_peer(peer, model, pictures, folder, repeats)
            yield (
                f"vLLM, the same pictures known: {theirs['cached']:.1f} ms, "
                f"{theirs['cached'] / ours:.1f}x ours (floor 5); of it decoding: "
                f"{theirs['decode']:.1f} ms; given decoded ones: "
                f"{theirs['cached_without_decoding']:.2f} ms; unknown: {theirs['uncached']:.1f} ms"
            )


def run_peer(
    peer: Path, model: Path, pictures: Sequence[bytes], folder: str, repeats: int
) -> dict[str, float]:
    """Run the peer's script in its own interpreter; return its medians in milliseconds."""
    paths = []
    for number, picture in enumerate(pictures):
        path = Path(folder) / f"{number}.jpg"
        path.write_bytes(picture)
        paths.append(str(path))
    settings = Path(folder) / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "model": str(model),
                "images": paths,
                "prompt": PROMPT,
                "max_model_len": 8192,
                "repeats": repeats,
            }
        )
    )
    script = Path(__file__).parent / "peer_processor.py"
    done = subprocess.run(
        [str(peer), str(script), str(settings)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_updates(repeats: int) -> Iterator[str]:
    """Apply and find the updates of 500 and of 1,000 items of 300 tokens."""
    runs = {number: _updates_of(number) for number in (500, 1000)}
    seconds = compare({str(number): run for number, run in runs.items()}, repeats)
    ratio = seconds["1000"] / seconds["500"]
    yield (
        f"prompt updates, 1,000 items, 300,000 tokens: {seconds['1000'] * 1e3:.1f} ms; "
        f"{ratio:.2f}x those of half as many (ceiling 2.3)"
    )


def _updates_of(number: int) -> Callable[[], object]:
    content = PromptUpdateDetails.select_token_id([7, *[8] * 297, 9], 8)
    update = PromptReplacement("image", [5], content)
    updates = {"image": [[update.resolve(index)] for index in range(number)]}
    prompt = [token_id for index in range(number) for token_id in (5, 100 + index % 50)]

    def run() -> object:
        token_ids, _ = apply_token_matches(prompt, updates)
        found = find_mm_placeholders(token_ids, updates)
        assert len(token_ids) == 300 * number
        assert len(found["image"]) == number
        return found

    return run


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peer", type=Path, help="a Python interpreter that has vLLM")
    parser.add_argument("--repeats", type=int, default=25)
    flags = parser.parse_args()
    pictures = photographs(NUM_IMAGES)
    for lines in (
        measure_images(flags.repeats),
        measure_hashing(pictures[0], flags.repeats),
        measure_requests(pictures, flags.repeats, flags.peer),
        measure_updates(flags.repeats),
        measure_shm(flags.repeats),
        measure_bridge(),
    ):
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
