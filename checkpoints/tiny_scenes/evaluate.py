"""Ask the trained checkpoint about freshly drawn scenes, through mmjax's own serving path.

    python checkpoints/tiny_scenes/evaluate.py [--questions 2000] [--seed 1] [--model FOLDER]
        [--quantization int8] [--italian FOLDER]

With --italian, answers are to be Italian, by the adapter of a folder (`train_lora.py` makes it).
Every question has scenes of its own, and every kind is asked equally often, so the overall numbers
are also means over kinds. Beside each accuracy stand what the most frequent answer to a question of
that form would get, and what the model gets when the pictures are shuffled among the questions: the
picture must matter. Ends with status 1 if a target is missed.
"""

import argparse
import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batches import relate_number
from italian import reword
from PIL import Image
from questions import ONE_KINDS, PAIR_KINDS, Question, ask, ask_pair, is_right
from scenes import EVALUATION, Scene, draw, sample_number, sample_scene

NUMBER_SHARE = 0.6
"""Share of scenes with a number."""
NONE_SHARE = 0.08
"""Share of questions for the number that find none."""
LEAST = {"one": 98.5, "one kind": 97.0, "two": 95.0, "two kind": 90.0}
"""Targets in percent."""
MOST_ABOVE_MAJORITY = 5.0
MAX_TOKENS = 160
"""Of an answer: words that the tokenizer does not have are spelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A question with the scenes it is about."""

    question: Question
    scenes: tuple[Scene, ...]

    @property
    def is_pair(self) -> bool:
        return len(self.scenes) == 2


Prompt = tuple[Sequence[Image.Image], str]
"""Pictures and a question, in this order."""

Answerer = Callable[[Sequence[Prompt]], list[str]]


def draw_items(count: int, seed: int) -> list[Item]:
    """Questions of all kinds in turn, each about scenes of its own."""
    rng = random.Random(f"evaluate {seed}")
    kinds = ONE_KINDS + PAIR_KINDS
    return [_draw_item(kinds[i % len(kinds)], rng) for i in range(count)]


def _draw_item(kind: str, rng: random.Random) -> Item:
    while True:
        numbers = _draw_numbers(kind, rng)
        scenes = tuple(sample_scene(rng, EVALUATION, number) for number in numbers)
        if len(scenes) == 2:
            question = ask_pair(kind, scenes[0], scenes[1], rng)
        else:
            question = ask(kind, scenes[0], rng)
        if question is not None:
            return Item(question=question, scenes=scenes)


def _draw_numbers(kind: str, rng: random.Random) -> list[str | None]:
    if kind == "number":
        return [sample_number(rng) if rng.random() >= NONE_SHARE else None]
    if kind == "same_number":
        number = sample_number(rng)
        return [number, relate_number(rng, number)]
    count = 2 if kind in PAIR_KINDS else 1
    return [sample_number(rng) if rng.random() < NUMBER_SHARE else None for _ in range(count)]


def in_italian(item: Item) -> Item:
    """Return the item with its answer in Italian."""
    return dataclasses.replace(item, question=reword(item.question))


def ask_items(
    answer: Answerer, items: Sequence[Item], shown: Sequence[tuple[Scene, ...]]
) -> list[bool]:
    """Whether each item is answered right when the pictures `shown` come with it."""
    prompts = [
        ([draw(scene) for scene in scenes], item.question.text)
        for item, scenes in zip(items, shown, strict=True)
    ]
    return [
        is_right(item.question.kind, item.question.answer, given)
        for item, given in zip(items, answer(prompts), strict=True)
    ]


def shuffle_scenes(items: Sequence[Item], seed: int) -> list[tuple[Scene, ...]]:
    """The items' scenes, dealt out anew among the questions about as many pictures."""
    rng = random.Random(f"shuffle {seed}")
    dealt: list[tuple[Scene, ...]] = [item.scenes for item in items]
    for is_pair in (False, True):
        places = [i for i, item in enumerate(items) if item.is_pair == is_pair]
        order = rng.sample(places, len(places))
        for place, other in zip(places, order, strict=True):
            dealt[place] = items[other].scenes
    return dealt


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the report, in percent."""

    name: str
    asked: int
    accuracy: float
    majority: float
    shuffled: float

    def __str__(self) -> str:
        numbers = f"{self.accuracy:9.1f} {self.majority:9.1f} {self.shuffled:9.1f}"
        return f"{self.name:12s} {self.asked:6d} {numbers}"


def report(items: Sequence[Item], right: Sequence[bool], shuffled: Sequence[bool]) -> list[Line]:
    """One line a kind, then one for all single pictures and one for all pairs."""
    lines = []
    groups = [(kind, (kind,)) for kind in ONE_KINDS + PAIR_KINDS]
    for name, kinds in [*groups, ("ONE PICTURE", ONE_KINDS), ("TWO PICTURES", PAIR_KINDS)]:
        places = [i for i, item in enumerate(items) if item.question.kind in kinds]
        if not places:
            continue
        answers: dict[str, Counter[str]] = defaultdict(Counter)
        for i in places:
            answers[items[i].question.form][items[i].question.answer] += 1
        majority = sum(counts.most_common(1)[0][1] for counts in answers.values())
        share = 100 / len(places)
        lines.append(
            Line(
                name=name,
                asked=len(places),
                accuracy=share * sum(right[i] for i in places),
                majority=share * majority,
                shuffled=share * sum(shuffled[i] for i in places),
            )
        )
    return lines


def find_misses(lines: Sequence[Line]) -> list[str]:
    """Say which targets are missed."""
    misses = []
    for line in lines:
        size = "two" if line.name in PAIR_KINDS or line.name == "TWO PICTURES" else "one"
        is_total = line.name.isupper()
        least = LEAST[size if is_total else f"{size} kind"]
        if line.accuracy < least:
            misses.append(f"{line.name}: {line.accuracy:.1f}; at least {least} expected")
        if is_total and line.shuffled > line.majority + MOST_ABOVE_MAJORITY:
            misses.append(f"{line.name}: {line.shuffled:.1f} with shuffled pictures")
    return misses


def serve_answers(model: Path | None, *, lora: Path | None = None, **settings: Any) -> Answerer:
    """Answer through `mmjax.LLM`, greedily; `lora`: of an adapter."""
    from mmjax import LLM, LoRARequest, SamplingParams

    adapter = None if lora is None else LoRARequest(lora.name, 1, str(lora))
    settings |= {"enable_lora": True, "max_loras": 1} if adapter is not None else {}
    llm = LLM(model, max_model_len=512, use_tqdm_on_load=False, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

    def answer(prompts: Sequence[Prompt]) -> list[str]:
        chats: list[list[dict[str, Any]]] = []
        for pictures, text in prompts:
            parts = [{"type": "image_pil", "image_pil": picture} for picture in pictures]
            chats.append([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])
        outputs = llm.chat(chats, params, use_tqdm=False, lora_request=adapter)
        return [output.outputs[0].text for output in outputs]

    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask tiny_scenes about fresh scenes.")
    parser.add_argument("--model", type=Path, default=None, help="default: the embedded one")
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="as the server's flag")
    parser.add_argument("--quantization", default=None, help="as the server's flag")
    parser.add_argument("--italian", type=Path, default=None, help="an adapter's folder")
    args = parser.parse_args()
    items = draw_items(args.questions, args.seed)
    if args.italian is not None:
        items = [in_italian(item) for item in items]
    settings = {"dtype": args.dtype, "quantization": args.quantization}
    answer = serve_answers(args.model, lora=args.italian, **settings)
    right = ask_items(answer, items, [item.scenes for item in items])
    shuffled = ask_items(answer, items, shuffle_scenes(items, args.seed))
    lines = report(items, right, shuffled)
    print(f"{'kind':12s} {'asked':>6s} {'accuracy':>9s} {'majority':>9s} {'shuffled':>9s}")
    print(*lines, sep="\n")
    misses = find_misses(lines)
    print("targets:", "; ".join(misses) if misses else "met")
    return 1 if misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
