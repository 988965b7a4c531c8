"""Time to first token of a second turn about a picture, beside texts of the same new length.

`python -m benchmarks.second_turn [--layers 4] [--repeats 9] [--narrow] [--recurrent]` makes a
random Gemma 3 with layers of the 4B's shape (`--narrow`: of `benchmarks.step`'s), whose pictures
take 1,024 tokens; `--recurrent`: a Qwen3.5 of the 4B's shape (0.8B's), of which each fourth layer
attends. For each length of a question it measures in turn, over answers of several lengths: the
first turn (a new picture), the second (picture, first question, answer, question), a text of as
many tokens as the second computes, and a text of the question's tokens alone.

The second and third differ in what a picture costs that has been seen: looking up, hashing, and
attention to its tokens. The fourth tells what whole blocks cost: the end of the last answer, up to
a block, is computed again; by a recurrent model all of it is, from the last snapshot in the prompt.

`--levels` measures instead the same second turn with its blocks on the device, in host memory
(`--kv-offload-gb`), in the directories of an engine that ended (`--kv-offload-dir`,
`--mm-processor-cache-dir`, `--encoder-cache-dir`), and nowhere; `--tiny`: of tiny_scenes;
`--model PATH`: of a Gemma 3's checkpoint. The picture is a file, which after a restart must neither
be decoded nor encoded.
"""

import argparse
import io
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmjax import LLM, SamplingParams
from mmjax.engine.core import EngineCore
from tests.families.directories import edit_json
from tests.families.qwen3_vl import QWEN3_5, write_files
from tests.kit import IMAGE_START, draw, tiny_gemma3_checkpoint

QUESTIONS = (16, 48, 96, 160)
"""Tokens of the second question."""
_REST_S = 0.5
FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
SETTINGS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "precompile": "all",
    "use_tqdm_on_load": False,
}
SHAPE_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 1024,
}
NARROW_SHAPE = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
}
RECURRENT_4B = {
    **{"hidden_size": 2560, "intermediate_size": 9216, "head_dim": 256},
    **{"num_attention_heads": 16, "num_key_value_heads": 4},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
NARROW_RECURRENT = {
    **RECURRENT_4B,
    **{"hidden_size": 1024, "intermediate_size": 3584, "linear_num_value_heads": 16},
    **{"num_attention_heads": 8, "num_key_value_heads": 2},
}
"""Qwen3.5's 4B and 0.8B."""


def make_recurrent_checkpoint(path: Path, shape: dict[str, int], layers: int) -> Path:
    """Write the model's files but for weights: 1,024 tokens for pictures of 1,024 pixels a side."""
    folder = write_files("qwen3_5", path)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    text = {
        **shape,
        "num_hidden_layers": layers,
        "layer_types": [kinds[number % 4] for number in range(layers)],
        "rope_parameters.mrope_section": [11, 11, 10],
        "rope_parameters.partial_rotary_factor": 0.25,
    }
    edits = {f"text_config.{name}": value for name, value in text.items()}
    edit_json(
        folder / "config.json", {**edits, "vision_config.out_hidden_size": shape["hidden_size"]}
    )
    size = {"shortest_edge": 4096, "longest_edge": 1024**2}
    edit_json(folder / "preprocessor_config.json", {"size": size})
    return folder


def make_checkpoint(path: Path, shape: dict[str, int], layers: int) -> Path:
    """Write the model: 1,024 soft tokens for a picture of 448 pixels a side."""
    heads = {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": layers}
    return tiny_gemma3_checkpoint(
        path,
        text={**shape, **heads},
        vision={"image_size": 448, "hidden_size": 64, "intermediate_size": 128},
        tokens_per_image=1024,
    )


class Asker:
    """Makes prompts that were never seen, of given lengths, and asks them."""

    def __init__(self, llm: LLM, placeholder: str, side: int) -> None:
        """`placeholder`: a picture's, in a prompt; `side`: of a picture, in pixels."""
        self._llm = llm
        self._side = side
        self._rng = random.Random(0)
        tokenizer = llm.get_tokenizer()
        words = tokenizer("what color is the circle in picture and how", add_special_tokens=False)
        self._words: list[int] = words["input_ids"]
        self._begin: list[int] = tokenizer(f"{placeholder} what is it ?")["input_ids"]

    def question(self, length: int) -> list[int]:
        """Return `length` tokens of words."""
        return self._rng.choices(self._words, k=length)

    def picture(self, number: int) -> dict[str, Any]:
        """Return the first prompt about a picture of its own."""
        file = io.BytesIO()
        draw(self._side, self._side, seed=number).save(file, "PNG")
        media = {"image": file.getvalue()}
        return {"prompt_token_ids": self._begin, "multi_modal_data": media}

    def first_turn(self, prompt: dict[str, Any], answer_tokens: int) -> list[int]:
        """Return the tokens of the question and its answer, before the picture's are put in."""
        # Words alone: a random model would also say tokens that stand for pictures.
        params = SamplingParams(
            max_tokens=answer_tokens, ignore_eos=True, allowed_token_ids=self._words
        )
        (output,) = self._llm.generate(prompt, params, use_tqdm=False)
        return [*self._begin, *output.outputs[0].token_ids]

    def first_token(self, prompt: dict[str, Any] | list[int]) -> tuple[float, int]:
        """Return the seconds to the first token, and how many tokens were computed for it."""
        asked = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        start = time.perf_counter()
        (output,) = self._llm.generate(asked, FIRST_TOKEN, use_tqdm=False)
        seconds = time.perf_counter() - start
        self.output = output
        return seconds, len(output.prompt_token_ids) - (output.num_cached_tokens or 0)


def answer_lengths(count: int) -> Iterator[int]:
    """Yield lengths that leave every part of a block behind."""
    yield from (8 + 7 * number % 32 for number in range(count))


def measure(asker: Asker, length: int, repeats: int) -> dict[str, list[float]]:
    """Return the times and lengths of each kind of request, interleaved."""
    rows: dict[str, list[float]] = {
        name: [] for name in ("first", "turn", "text", "alone", "computed")
    }
    for number, answer_tokens in enumerate(answer_lengths(repeats + 1)):
        first = asker.picture(1000 * length + number)
        rows["first"].append(asker.first_token(first)[0])
        said = asker.first_turn(first, answer_tokens)
        # Not measured: on a busy host whatever comes behind so long a computation waits for longer.
        asker.first_token(asker.question(length))
        turn = {**first, "prompt_token_ids": said + asker.question(length)}
        seconds, computed = asker.first_token(turn)
        rows["turn"].append(seconds)
        rows["computed"].append(computed)
        rows["text"].append(asker.first_token(asker.question(computed))[0])
        rows["alone"].append(asker.first_token(asker.question(length))[0])
    return {name: values[1:] for name, values in rows.items()}


def measure_levels(model: str | None, repeats: int) -> dict[str, list[tuple[float, int]]]:
    """Return the times of a second turn's first token, by where its blocks are.

    Each with how many tokens were computed.
    """
    rows: dict[str, list[tuple[float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | {
            "max_model_len": 1536 if model else 256,
            "kv_offload_gb": 1.0,
            "kv_offload_dir": str(Path(folder) / "kv"),
            "mm_processor_cache_dir": str(Path(folder) / "items"),
            "encoder_cache_dir": str(Path(folder) / "rows"),
        }
        turns: list[dict[str, Any]] = []
        for number in range(repeats + 1):
            with LLM(model, **settings) as llm:
                asker, core, earlier = Asker(llm, IMAGE_START, 640), llm.engine, turns
                rest(core)
                # What the next engine is asked, and finds in the directories: about one picture
                # for its first hit, with what a program's first run costs, and about another.
                turns = []
                for picture in (2 * number, 2 * number + 1):
                    first = asker.picture(picture)
                    said = asker.first_turn(first, 8) + asker.question(48 if model else 40)
                    turns.append({**first, "prompt_token_ids": said})
                    asker.first_token(turns[-1])
                if not earlier:
                    rest(core)
                    continue
                times = {}
                for name, last in zip(("directory, first", "directory"), earlier, strict=True):
                    rest(core)
                    times[name] = asker.first_token(last)
                    (item,), stages = asker.output.items, asker.output.times
                    assert (item.processing, item.encoding) == ("disk", "prefix_cache")
                    assert stages.decode == stages.encode == 0.0
                last = earlier[-1]
                rest(core)
                times["device"] = asker.first_token(last)
                core._scheduler.reset_prefix_cache(keeps_host=True)
                rest(core)
                times["host memory"] = asker.first_token(last)
                core._scheduler.kv_cache.leave_directory()
                core.reset_prefix_cache()
                rest(core)
                times["nowhere"] = asker.first_token(last)
                for name, found in times.items():
                    rows.setdefault(name, []).append(found)
    return rows


def rest(core: EngineCore) -> None:
    """Do what a server's engine does between requests, and wait.

    So what comes next meets what every request on a quiet server does: files are written, and
    processors have slept.
    """
    core.step()
    while core.is_warming:
        core.step()
    time.sleep(_REST_S)


def print_levels(model: str | None, repeats: int) -> None:
    """Print a row for each place where blocks may be."""
    rows = measure_levels(model, repeats)
    device = [seconds for seconds, _ in rows["device"]]
    print("milliseconds to the first token of a second turn, medians; of a hit on the device")
    for name, values in rows.items():
        times = [seconds for seconds, _ in values]
        computed = statistics.median(number for _, number in values)
        of_device = ratio(times, device)
        print(
            f"{1e3 * statistics.median(times):8.1f} {of_device:6.2f}  {name}, {computed:.0f} tokens"
        )


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of what was measured one after the other."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def main() -> None:
    """Print a row for each length of a question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--narrow", action="store_true", help="18 layers of width 640")
    parser.add_argument("--recurrent", action="store_true", help="Qwen3.5's shape")
    parser.add_argument(
        "--layers", type=int, help="default: 4, or 18 of the narrow ones, 8 of recurrent ones"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--levels", action="store_true", help="where the blocks may be")
    parser.add_argument("--tiny", action="store_true", help="of tiny_scenes; with --levels")
    parser.add_argument("--model", help="of a checkpoint; with --levels")
    flags = parser.parse_args()
    if flags.levels and (flags.tiny or flags.model):
        print_levels(flags.model, flags.repeats)
        return
    if flags.recurrent:
        make, settings = make_recurrent_checkpoint, {**SETTINGS, "load_format": "dummy"}
        shape = NARROW_RECURRENT if flags.narrow else RECURRENT_4B
        placeholder, side = QWEN3_5.placeholder, 1024
    else:
        make, settings = make_checkpoint, SETTINGS
        shape = NARROW_SHAPE if flags.narrow else SHAPE_4B
        placeholder, side = IMAGE_START, 640
    narrow_layers = 8 if flags.recurrent else 18
    layers = flags.layers or (narrow_layers if flags.narrow else 4)
    all_ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder), shape, layers)
        if flags.levels:
            print_levels(str(model), flags.repeats)
            return
        with LLM(str(model), **settings) as llm:
            asker = Asker(llm, placeholder, side)
            print("milliseconds to the first token, medians; ratios of pairs, medians")
            print(
                "question  computed  second turn  text as long  ratio  question alone  ratio  first"
            )
            for length in QUESTIONS:
                rows = measure(asker, length, flags.repeats)
                median = {name: statistics.median(values) for name, values in rows.items()}
                ms = {name: 1e3 * value for name, value in median.items()}
                all_ratios += [a / b for a, b in zip(rows["turn"], rows["text"], strict=True)]
                print(
                    f"{length:8} {median['computed']:9.0f} {ms['turn']:12.1f} {ms['text']:13.1f}"
                    f" {ratio(rows['turn'], rows['text']):6.2f} {ms['alone']:15.1f}"
                    f" {ratio(rows['turn'], rows['alone']):6.2f} {ms['first']:6.0f}",
                    flush=True,
                )
            compiled = llm.engine.compilations
    print(
        f"second turn / text of the same new length: {statistics.median(all_ratios):.2f}"
        f" (ceiling 1.2, recurrent 1.3); compilations: {compiled}"
    )


if __name__ == "__main__":
    main()
