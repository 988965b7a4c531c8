"""`mmjax run-batch` under kills: is each line answered once, does memory grow, how fast is it?

python -m benchmarks.batches --lines 20000 --kills 10
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from mmjax import LLM, SamplingParams

MAX_TOKENS = 8
_OBJECTS = ("circle", "square", "triangle")
_COLORS = ("red", "green", "blue", "yellow")


class Sampled(NamedTuple):
    """What a look at the running command saw."""

    num_lines: int
    at: float
    rss_mib: float
    """Of the API server's process, which holds the lines."""


def conversation(number: int) -> list[dict[str, Any]]:
    """Return what a line asks: no two alike."""
    draw = random.Random(number)
    text = f"Is {number} a {draw.choice(_COLORS)} {draw.choice(_OBJECTS)}?"
    return [{"role": "user", "content": text}]


def write_input(path: Path, num_lines: int) -> None:
    """Write an input of so many lines."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(1, num_lines + 1):
            body = {
                "messages": conversation(number),
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            line = {"custom_id": f"line-{number}", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def run(folder: Path, num_lines: int, num_kills: int, *flags: str) -> list[list[Sampled]]:
    """Kill the command again and again over one half, then let it end; return its lives."""
    kills = [num_lines // 2 * (one + 1) // max(1, num_kills) for one in range(num_kills)]
    lives = [_live(folder, kill_at, *flags) for kill_at in (*kills, None)]
    counted = Counter(json.loads(line)["custom_id"] for line in (folder / "out.jsonl").open("rb"))
    assert counted == {f"line-{number}": 1 for number in range(1, num_lines + 1)}
    assert not (folder / "out.errors.jsonl").exists()
    return lives


def _live(folder: Path, kill_at: int | None, *flags: str) -> list[Sampled]:
    output, seen = folder / "out.jsonl", list[Sampled]()
    command = [sys.executable, "-m", "mmjax", "run-batch", str(folder / "in.jsonl"), str(output)]
    num_lines = position = 0
    with subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.5)
            if output.exists():
                with output.open("rb") as file:
                    file.seek(position)
                    new = file.read()
                num_lines += new.count(b"\n")
                position += len(new)
            rss = _rss_mib(process.pid)
            seen.append(Sampled(num_lines, time.monotonic(), rss))
            if kill_at is not None and num_lines >= kill_at:
                process.kill()
                break
    assert kill_at is not None or process.returncode == 0
    return seen


def _rss_mib(pid: int) -> float:
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.Error:
        return 0.0


def engines_rate(num_lines: int, model: str | None) -> float:
    """Return how many of the same lines a second `LLM.chat` answers."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    asked = [conversation(number) for number in range(1, num_lines + 1)]
    with LLM(model) as llm:
        # The first call compiles.
        llm.chat(asked[: min(256, num_lines // 2)], params, use_tqdm=False)
        start = time.monotonic()
        llm.chat(asked, params, use_tqdm=False)
        return num_lines / (time.monotonic() - start)


def steady_rate(life: list[Sampled]) -> float:
    """Return the lines a second of the second half of a life's lines, when all is compiled."""
    last = next(one for one in life if one.num_lines == life[-1].num_lines)
    middle = (life[0].num_lines + last.num_lines) / 2
    first = next(one for one in life if one.num_lines >= middle)
    return (last.num_lines - first.num_lines) / max(last.at - first.at, 1e-9)


def main() -> None:
    """Print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--engine-lines", type=int, default=3000, help="0: not measured")
    parser.add_argument("--model", help="default: the one that comes with mmjax")
    options = parser.parse_args()
    flags = [] if options.model is None else [options.model]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_input(folder / "in.jsonl", options.lines)
        lives = run(folder, options.lines, options.kills, *flags)
    for life in lives:
        working = [one for one in life if one.num_lines > life[0].num_lines] or life
        quarter = len(working) // 4
        early, late = working[quarter].rss_mib, max(one.rss_mib for one in working[quarter:])
        print(
            f"{life[0].num_lines} to {life[-1].num_lines} lines: {steady_rate(life):.1f}/s in the "
            f"second half, RSS {early:.0f} MiB after a quarter, at most {late:.0f} MiB later"
        )
    if options.engine_lines:
        print(f"LLM.chat: {engines_rate(options.engine_lines, options.model):.1f}/s")


if __name__ == "__main__":
    main()
