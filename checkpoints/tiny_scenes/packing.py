"""Pack questions and answers into rows of tokens, several chats to a row, for training.

A row holds a shared beginning (segment 0: the turn's opening and the pictures) and then several
questions with answers (segments 1, 2, ...), each of which sees the beginning and itself only and
has the positions that it would have alone. A row may also hold whole chats side by side.

    tokens     <bos> <start_of_turn> user ... <end_of_image> | <newlines> what ▁color ... red | ...
    segment    0     0               0        0              | 1          1    1          1   | 2
    positions  0     1               2        41             | 42         43   44         55  | 42
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from build_checkpoint import SYSTEM_PROMPTS, build_tokenizer
from questions import PAIR_KINDS, Question, ask, ask_pair
from scenes import Scene
from tokenizers import Tokenizer

TOKENS_PER_PICTURE = 36
ROW_LENGTH = 160
MAX_TARGETS = 48

ONE_WEIGHTS = {
    "color": 1.0,
    "shape": 1.0,
    "count": 0.8,
    "count_shape": 1.2,
    "count_color": 1.2,
    "exist": 1.2,
    "left": 3.0,
}
"""How often each kind is tried; numbers and descriptions go by shares of their own."""

Reword = Callable[[Question], Question]
"""Changes what is asked or answered, as an adapter is to answer it."""


def as_asked(question: Question) -> Question:
    """Return a question as it is."""
    return question


class RowSize(NamedTuple):
    """What a row has room for."""

    tokens: int = ROW_LENGTH
    targets: int = MAX_TARGETS


ROW_SIZE = RowSize()


@functools.cache
def _tokenizer() -> Tokenizer:
    return build_tokenizer()


@functools.lru_cache(maxsize=1 << 16)
def encode(text: str) -> tuple[int, ...]:
    """Token ids without the opening `<bos>`."""
    return tuple(_tokenizer().encode(text, add_special_tokens=False).ids)


@dataclass(slots=True)
class Row:
    """One row while it is filled. `picture` is 1 + the picture's place in the batch, or 0."""

    size: RowSize = ROW_SIZE
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    picture: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    """1 + which picture of the row, for attention inside it; 0 for text."""
    targets: list[tuple[int, int]] = field(default_factory=list)
    """(index of the token that predicts, the id to predict)."""
    questions: list[tuple[Question, int, int]] = field(default_factory=list)
    """Each question with its span of `targets`."""

    def add(self, ids: Sequence[int], segment: int, position: int, picture: int = 0) -> int:
        """Append tokens; return the position after them."""
        self.tokens += ids
        self.positions += range(position, position + len(ids))
        self.segment += [segment] * len(ids)
        self.picture += [picture] * len(ids)
        run = 1 + max(self.run, default=0) if picture else 0
        self.run += [run] * len(ids)
        return position + len(ids)

    def add_picture(self, segment: int, position: int, picture: int) -> int:
        """Append a picture's soft tokens; `picture` counts from 0."""
        soft = encode("<image_soft_token>") * TOKENS_PER_PICTURE
        return self.add(soft, segment, position, picture + 1)

    def add_answer(self, question: Question, segment: int, position: int) -> int:
        """Append an answer and learn it, with the end of the turn, which is not appended."""
        answer = encode(question.answer)
        start, first = len(self.targets), len(self.tokens) - 1
        goals = (*answer, *encode("<end_of_turn>"))
        self.targets += [(first + i, goal) for i, goal in enumerate(goals)]
        self.questions.append((question, start, len(self.targets)))
        return self.add(answer, segment, position)

    def has_room(self, num_tokens: int, num_targets: int) -> bool:
        return (
            len(self.tokens) + num_tokens <= self.size.tokens
            and len(self.targets) + num_targets <= self.size.targets
        )


Piece = str | int
"""Text, or a picture by its place in the batch."""

REPLY = "<end_of_turn>\n<start_of_turn>model\n"


def chat_pieces(turn: Sequence[Piece], *, system: str = "") -> list[Piece]:
    """A first user turn as the chat template and Gemma 3's processor write it, in pieces.

    Neighbouring texts are joined, so that newlines merge as they do in a whole prompt.
    """
    pieces: list[Piece] = ["<bos><start_of_turn>user\n" + (system + "\n\n" if system else "")]
    for part in turn:
        if isinstance(part, str):
            pieces[-1] = str(pieces[-1]) + part
        else:
            pieces[-1] = str(pieces[-1]) + "\n\n<start_of_image>"
            pieces += [part, "<end_of_image>\n\n"]
    return pieces


def _add_pieces(row: Row, pieces: Sequence[Piece], segment: int, position: int) -> int:
    for piece in pieces:
        if isinstance(piece, str):
            position = row.add(encode(piece), segment, position)
        else:
            position = row.add_picture(segment, position, piece)
    return position


def pack_shared(
    pictures: Sequence[int],
    next_question: Callable[[], Question | None],
    tries: int,
    size: RowSize = ROW_SIZE,
) -> Row:
    """A row of questions that share its pictures, which come first."""
    row = Row(size)
    opening = chat_pieces(pictures)
    opening[-1] = str(opening[-1]).removesuffix("\n\n")
    start = _add_pieces(row, opening, 0, 0)
    segment = 1
    for _ in range(tries):
        question = next_question()
        if question is None:
            continue
        prompt, answer = encode("\n\n" + question.text + REPLY), encode(question.answer)
        if row.has_room(len(prompt) + len(answer), len(answer) + 1):
            position = row.add(prompt, segment, start)
            row.add_answer(question, segment, position)
            segment += 1
    return row


def one_question_source(
    scene: Scene, rng: random.Random, reword: Reword = as_asked
) -> Callable[[], Question | None]:
    """Questions about one scene: at most one number and one description, the rest by weight."""
    firsts = []
    if rng.random() < (0.85 if scene.number is not None else 0.12):
        firsts.append("number")
    if rng.random() < 0.6:
        firsts.append("describe")
    kinds, weights = tuple(ONE_WEIGHTS), tuple(ONE_WEIGHTS.values())
    asked: set[str] = set()

    def next_question() -> Question | None:
        kind = firsts.pop() if firsts else rng.choices(kinds, weights)[0]
        question = ask(kind, scene, rng)
        if question is None or question.text in asked:
            return None
        asked.add(question.text)
        return reword(question)

    return next_question


def pair_question_source(
    first: Scene, second: Scene, rng: random.Random, reword: Reword = as_asked
) -> Callable[[], Question | None]:
    """Questions about two scenes; two numbers are always compared."""
    firsts = ["same_number"] if first.number is not None and second.number is not None else []

    def next_question() -> Question | None:
        kind = firsts.pop() if firsts else rng.choices(PAIR_KINDS, (1.0, 0.35, 1.0))[0]
        question = ask_pair(kind, first, second, rng)
        return None if question is None else reword(question)

    return next_question


def pack_chats(
    scenes: Sequence[Scene],
    rng: random.Random,
    reword: Reword = as_asked,
    size: RowSize = ROW_SIZE,
) -> Row:
    """Whole chats side by side: question first, a system prompt, follow-up questions."""
    row, segment = Row(size), 1
    for _ in range(4):
        chat = _sample_chat(scenes, rng, reword)
        if chat is None:
            continue
        trial = Row()
        for pieces, question in chat:
            trial_end = _add_pieces(trial, pieces, 1, len(trial.tokens))
            trial.add_answer(question, 1, trial_end)
        if row.has_room(len(trial.tokens), len(trial.targets)):
            position = 0
            for pieces, question in chat:
                position = _add_pieces(row, pieces, segment, position)
                position = row.add_answer(question, segment, position)
            segment += 1
    return row


def _sample_chat(
    scenes: Sequence[Scene], rng: random.Random, reword: Reword
) -> list[tuple[list[Piece], Question]] | None:
    """Turns of one chat in a layout other than "picture, then question"."""
    place = rng.randrange(len(scenes))
    if rng.random() < 0.12 and len(scenes) > 1:
        other = (place + 1) % len(scenes)
        question = pair_question_source(scenes[place], scenes[other], rng, reword)()
        if question is None:
            return None
        return [(_closed(chat_pieces([question.text, place, other])), question)]
    source = one_question_source(scenes[place], rng, reword)
    question, follow_up = source(), source()
    if question is None:
        return None
    layout = rng.random()
    if layout < 0.3:
        return [(_closed(chat_pieces([question.text, place])), question)]
    if layout < 0.55:
        system = _sample_system_prompt(rng)
        return [(_closed(chat_pieces([place, question.text], system=system)), question)]
    if layout < 0.7:
        return [(_closed(chat_pieces([place, "\n" + question.text])), question)]
    turns = [(_closed(chat_pieces([place, question.text])), question)]
    if follow_up is not None:
        again = f"<end_of_turn>\n<start_of_turn>user\n{follow_up.text}{REPLY}"
        turns.append(([again], follow_up))
    return turns


def _closed(pieces: list[Piece]) -> list[Piece]:
    return [*pieces[:-1], str(pieces[-1]) + REPLY]


def _sample_system_prompt(rng: random.Random) -> str:
    """A usual one, or arbitrary words, which must not matter."""
    if rng.random() < 0.5:
        return rng.choice(SYSTEM_PROMPTS)
    ids = [rng.randrange(14, _tokenizer().get_vocab_size()) for _ in range(rng.randint(2, 12))]
    return _tokenizer().decode(ids).strip() or SYSTEM_PROMPTS[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows as arrays; unused places are 0, with segment -1 and target weight 0."""

    tokens: np.ndarray
    """int32[rows, tokens]"""
    positions: np.ndarray
    segment: np.ndarray
    run: np.ndarray
    features: np.ndarray
    """int32[rows, tokens]; row of the batch's soft tokens to put there, or -1."""
    target_index: np.ndarray
    """int32[rows, targets]"""
    target_id: np.ndarray
    target_weight: np.ndarray
    """float32[rows, targets]; 0 where there is no target."""


def to_arrays(
    rows: Sequence[Row], emphasis: Mapping[str, float], size: RowSize = ROW_SIZE
) -> PackedRows:
    """Pad the rows and stack them; `emphasis` gives target weights other than 1, by kind."""
    shape = (len(rows), size.tokens)
    names = ("tokens", "positions", "segment", "run", "features")
    arrays = {name: np.zeros(shape, np.int32) for name in names}
    arrays["segment"][:] = -1
    index = np.zeros((len(rows), size.targets), np.int32)
    goal, weight = np.zeros_like(index), np.zeros(index.shape, np.float32)
    for r, row in enumerate(rows):
        length, num_targets = len(row.tokens), len(row.targets)
        for name in ("tokens", "positions", "segment", "run"):
            arrays[name][r, :length] = getattr(row, name)
        picture = np.zeros(size.tokens, np.int32)
        picture[:length] = row.picture
        inside = np.zeros(size.tokens, np.int32)
        for run in range(1, max(row.run, default=0) + 1):
            inside[arrays["run"][r] == run] = np.arange(TOKENS_PER_PICTURE)
        soft = (picture - 1) * TOKENS_PER_PICTURE + inside
        arrays["features"][r] = np.where(picture > 0, soft, -1)
        if num_targets:
            index[r, :num_targets], goal[r, :num_targets] = zip(*row.targets, strict=True)
        for question, start, stop in row.questions:
            weight[r, start:stop] = emphasis.get(question.kind, 1.0)
    return PackedRows(**arrays, target_index=index, target_id=goal, target_weight=weight)
