"""The sampler against numpy, and its promise: a row's draw depends on nothing but the row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from mmjax.config.engine_config import LogprobsMode
from mmjax.engine.device.batch import NO_TOKEN, SampleBatch
from mmjax.engine.device.sampler import (
    EDIT_WIDTH,
    MAX_BANS,
    SampleOutput,
    SampleTables,
    empty_tables,
    sample_full,
    sample_greedy,
)
from mmjax.engine.scheduling.logit_rules import pack_token_ids
from mmjax.params.sampling_params import MAX_BIASES

VOCAB = 40
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "position": 0,
    "masked": (),
    "tokens": (),
    "ngram": 0,
    "prompt": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "allowed": None,
    "grammar": False,
    "bans": (),
    "bias": {},
    "reported": -1,
}
HISTORY_LEN = 24


def make_batch(rows: list[dict[str, Any]], *, has_logprobs: bool = False) -> SampleBatch:
    rows = [{**DEFAULTS, **row} for row in rows]
    masked = np.full((len(rows), 4), NO_TOKEN, np.int32)
    for number, row in enumerate(rows):
        masked[number, : len(row["masked"])] = row["masked"]
    filters = any(row["top_k"] or row["top_p"] < 1 or row["min_p"] for row in rows)
    fields = {
        "rows": np.zeros(len(rows), np.int32),
        "positions": np.array([row["position"] for row in rows], np.int32),
        "seeds": np.array([(row["seed"] >> 32, row["seed"] % 2**32) for row in rows], np.uint32),
        "top_k": np.array([row["top_k"] for row in rows], np.int32),
        "temperature": np.array([row["temperature"] for row in rows], np.float32),
        "top_p": np.array([row["top_p"] for row in rows], np.float32),
        "min_p": np.array([row["min_p"] for row in rows], np.float32),
        "masked_token_ids": masked,
        "token_from": np.array([row.get("from", -1) for row in rows], np.int32),
        "ngram_sizes": np.array([row["ngram"] for row in rows], np.int32),
        "ngram_windows": np.array([row.get("ngram_window", 0) for row in rows], np.int32),
        "prompt_lengths": np.array([row["prompt"] for row in rows], np.int32),
        **{
            f"{name}_penalty": np.array([row[f"{name}_penalty"] for row in rows], np.float32)
            for name in ("repetition", "presence", "frequency")
        },
        "reports_masked": np.array([row["grammar"] for row in rows], np.int32),
        "timestamps_from": np.zeros(len(rows), np.int32),
        "reported": np.array([row["reported"] + 1 for row in rows], np.int32),
        "has_filters": np.int32(filters),
        "has_logprobs": np.int32(has_logprobs),
        "has_masks": np.int32(any(row["allowed"] is not None for row in rows)),
        "has_edits": np.int32(any(row["bans"] or row["bias"] for row in rows)),
        "has_penalties": np.int32(
            any(
                (row["repetition_penalty"], row["presence_penalty"], row["frequency_penalty"])
                != (1, 0, 0)
                for row in rows
            )
        ),
    }
    return SampleBatch(**{name: jnp.asarray(value) for name, value in fields.items()})


_sample = jax.jit(sample_full, static_argnames="logprobs_mode")


def draw(
    logits: np.ndarray,
    rows: list[dict[str, Any]],
    *,
    previous: tuple[int, ...] = (0,),
    logprobs_mode: LogprobsMode = "raw_logprobs",
    **options: bool,
) -> SampleOutput:
    """Sample; a row's `tokens` are those that the host knows."""
    tables = make_tables([{**DEFAULTS, **row} for row in rows])
    arrays = (jax.tree.map(jnp.asarray, tables), jnp.asarray(previous, jnp.int32))
    batch = make_batch(rows, **options)
    return jax.device_get(_sample(jnp.asarray(logits), batch, *arrays, logprobs_mode=logprobs_mode))


def make_tables(rows: list[dict[str, Any]]) -> SampleTables:
    tables = empty_tables(len(rows), HISTORY_LEN, VOCAB)
    assert tables.edits.shape[1] == EDIT_WIDTH
    for number, row in enumerate(rows):
        tables.history[number, : len(row["tokens"])] = row["tokens"]
        if row["allowed"] is not None:
            tables.masks[number] = pack_token_ids(row["allowed"], VOCAB)
        edits = tables.edits[number]
        bans, biases = edits[: 2 * MAX_BANS].reshape(2, -1), edits[2 * MAX_BANS :]
        for place, ban in enumerate(row["bans"]):
            bans[:, place] = ban
        for place, (token_id, bias) in enumerate(row["bias"].items()):
            biases[place] = token_id
            biases.view(np.float32)[MAX_BIASES + place] = bias
    return tables


def make_logits(seed: int, num_rows: int = 1) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal((num_rows, VOCAB))).astype(np.float32)


def allowed_probabilities(logits: np.ndarray, row: dict[str, Any]) -> np.ndarray:
    """The distribution that a row asks for, in float64, one filter after the other."""
    row = {**DEFAULTS, **row}
    scores = logits.astype(np.float64)
    scores[list(row["masked"])] = -np.inf
    scores = scores / row["temperature"]
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    probs[probs < row["min_p"] * probs.max()] = 0
    order = np.argsort(-probs)
    if row["top_k"] > 0:
        probs[order[row["top_k"] :]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    if row["top_p"] < 1:
        probs[order[before >= row["top_p"]]] = 0
    return probs / probs.sum()


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 5},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.02, "temperature": 1.3},
    {"masked": (1, 2, 3), "top_p": 0.9},
]


@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(row: dict[str, Any]) -> None:
    num_draws = 4000
    logits = make_logits(3)
    expected = allowed_probabilities(logits[0], row)
    rows = [{**row, "seed": 11, "position": place} for place in range(num_draws)]
    tokens = draw(np.repeat(logits, num_draws, axis=0), rows).token_ids
    counts = np.bincount(tokens, minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    # Five standard deviations of a binomial count.
    tolerance = 5 * np.sqrt(num_draws * expected * (1 - expected)) + 1e-9
    assert (np.abs(counts - num_draws * expected) <= tolerance).all()


EDITS: list[dict[str, Any]] = [
    {"tokens": (3, 5, 5, 9, 5, 9, 0, 3, 1), "prompt": 3, "repetition_penalty": 1.7},
    {"tokens": (3, 5, 5, 9, 5, 9, 0, 3, 1), "prompt": 3, "repetition_penalty": 0.4},
    {"tokens": (3, 5, 5, 9, 5, 9, 0, 3, 1), "prompt": 3, "presence_penalty": 1.5},
    {"tokens": (3, 5, 5, 9, 5, 9, 0, 3, 1), "prompt": 3, "frequency_penalty": -1.3},
    {
        "tokens": (3, 5, 5, 9, 5, 9, 0, 3),
        "from": 1,
        "prompt": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.7,
        "frequency_penalty": 0.9,
    },
    {"allowed": (0, 7, 31, 32, 39)},
    {"allowed": (7,), "masked": (7,)},
    {"bans": ((-1, 4), (6, 7), (5, 8)), "from": 0},
    {"bias": {4: 100.0, 5: -100.0, 39: 3.5}},
    {
        "allowed": tuple(range(3, 30)),
        "bans": ((-1, 4), (6, 7)),
        "from": 1,
        "bias": {9: 2.0, 11: -4.0},
        "masked": (12,),
        "tokens": (3, 5, 5, 9, 5, 9, 0, 3),
        "prompt": 2,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.9,
    },
]
PREVIOUS = (5, 6)
"""The tokens in flight."""


def edited_logits(logits: np.ndarray, row: dict[str, Any]) -> np.ndarray:
    """What vLLM's sampler makes of a row before temperature, one step after the other."""
    row = {**DEFAULTS, **row}
    tokens = list(row["tokens"])
    if row.get("from", -1) >= 0:
        tokens.append(PREVIOUS[row["from"]])
    masked = logits.astype(np.float32).copy()
    if row["allowed"] is not None:
        masked[[token for token in range(VOCAB) if token not in row["allowed"]]] = -np.inf
    scores = masked.copy()
    for last, banned in row["bans"]:
        if last < 0 or last == PREVIOUS[row["from"]]:
            scores[banned] = -np.inf
    scores[list(row["masked"])] = -np.inf
    for token, bias in row["bias"].items():
        scores[token] += np.float32(bias)
    if not np.isfinite(scores).any():
        scores = masked
    output = tokens[row["prompt"] :]
    for token in set(tokens):
        penalty = np.float32(row["repetition_penalty"])
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= np.float32(row["frequency_penalty"]) * output.count(token)
        scores[token] -= np.float32(row["presence_penalty"])
    return scores


@pytest.mark.parametrize("row", EDITS, ids=str)
def test_greedy_takes_the_best_of_the_edited_logits(row: dict[str, Any]) -> None:
    logits = make_logits(23, 200)
    rows = [{**row, "temperature": 0.0, "position": 9}] * len(logits)
    tokens = draw(logits, rows, previous=PREVIOUS).token_ids
    expected = [int(edited_logits(one, row).argmax()) for one in logits]
    assert tokens.tolist() == expected
    assert tokens.tolist() != logits.argmax(-1).tolist(), "the edit says nothing"


@pytest.mark.parametrize("row", EDITS[-1:], ids=str)
def test_draws_follow_the_edited_distribution(row: dict[str, Any]) -> None:
    num_draws = 4000
    logits = make_logits(29)
    scores = edited_logits(logits[0], row).astype(np.float64)
    expected = np.exp(scores - scores.max())
    expected /= expected.sum()
    rows = [
        {**row, "seed": seed << 32, "position": 9, "temperature": 1.0} for seed in range(num_draws)
    ]
    tokens = draw(np.repeat(logits, num_draws, axis=0), rows, previous=PREVIOUS).token_ids
    counts = np.bincount(tokens, minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    tolerance = 5 * np.sqrt(num_draws * expected * (1 - expected)) + 1e-9
    assert (np.abs(counts - num_draws * expected) <= tolerance).all()


def test_repetition_is_that_of_hf() -> None:
    tokens = (3, 5, 5, 9, 5, 9, 0, 3, 1)
    logits = make_logits(31, 300)
    for penalty in (0.3, 1.1, 2.5):
        process: Any = RepetitionPenaltyLogitsProcessor(penalty)
        scores = process(torch.tensor([tokens] * len(logits)), torch.tensor(logits))
        row = {"temperature": 0.0, "position": 9, "tokens": tokens, "repetition_penalty": penalty}
        drawn = draw(logits, [row] * len(logits)).token_ids
        assert drawn.tolist() == scores.argmax(-1).tolist()


def test_logprobs_are_of_the_raw_logits_but_for_a_grammar_s_mask() -> None:
    """As vLLM: it masks by the grammar before the sampler, which reports what it is given."""
    logits = np.repeat(make_logits(37), 3, axis=0)
    rows = [
        {"allowed": (0, 7, 39), "bias": {7: 50.0}, "temperature": 0.0},
        {"allowed": (0, 7, 39), "grammar": True, "bias": {7: 50.0}, "temperature": 0.0},
        {"allowed": (0, 7, 39), "reported": 5, "temperature": 0.0},
    ]
    output = draw(logits, rows, has_logprobs=True)
    assert output.token_ids.tolist()[:2] == [7, 7]
    raw = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    kept = raw[[0, 7, 39]]
    masked = raw[7] - np.log(np.exp(kept).sum())
    np.testing.assert_allclose(output.logprobs, [raw[7], masked, raw[5]], rtol=1e-5)
    assert output.ranks[1] == 1 + (kept > raw[7]).sum()
    assert output.ranks[2] == 1 + (raw > raw[5]).sum()
    assert set(output.top_token_ids[1, :3]) == {0, 7, 39}
    assert np.isneginf(output.top_logprobs[1, 3:]).all()


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    rows = [{**row, "seed": 2**40 + 5, "position": 9} for row in (*FILTERS, *EDITS)]
    logits = make_logits(5, len(rows))
    together = draw(logits, rows, previous=PREVIOUS).token_ids
    alone = [
        draw(logits[n : n + 1], [row], previous=PREVIOUS).token_ids[0] for n, row in enumerate(rows)
    ]
    backwards = draw(logits[::-1], rows[::-1], previous=PREVIOUS, has_logprobs=True).token_ids[::-1]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, backwards)


def test_seed_and_position_both_matter() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    by_position = [draw(logits, [{"seed": 1, "position": n}]).token_ids[0] for n in range(12)]
    by_seed = [draw(logits, [{"seed": n << 32, "position": 1}]).token_ids[0] for n in range(12)]
    assert len(set(by_position)) > 4
    assert len(set(by_seed)) > 4


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_no_temperature_is_greedy(temperature: float) -> None:
    logits = make_logits(7, 3)
    rows = [{"temperature": temperature, "top_p": 0.5}] * 3
    np.testing.assert_array_equal(draw(logits, rows).token_ids, logits.argmax(-1))
    np.testing.assert_array_equal(sample_greedy(jnp.asarray(logits)), logits.argmax(-1))


@pytest.mark.parametrize("vocab_size", [7, 96, 640])
def test_greedy_takes_the_lowest_of_equals(vocab_size: int) -> None:
    logits = np.random.default_rng(vocab_size).integers(0, 3, (20, vocab_size)).astype(np.float32)
    logits[3] = -np.inf
    got = sample_greedy(jnp.asarray(logits))
    np.testing.assert_array_equal(got, logits.argmax(-1))


def test_a_masked_token_is_not_taken_even_if_most_probable() -> None:
    logits = make_logits(7)
    order = np.argsort(-logits[0])
    row = {"temperature": 0.0, "masked": tuple(order[:2])}
    assert draw(logits, [row]).token_ids[0] == order[2]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = make_logits(8, 2)
    rows = [{"temperature": 0.0, "masked": (int(logits[0].argmax()),)}, {"temperature": 3.0}]
    output = draw(logits, rows, has_logprobs=True)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for number, token_id in enumerate(output.token_ids):
        assert output.logprobs[number] == pytest.approx(expected[number, token_id], abs=1e-5)
        assert output.ranks[number] == 1 + (logits[number] > logits[number, token_id]).sum()
        best = np.argsort(-logits[number])[:20]
        np.testing.assert_array_equal(output.top_token_ids[number], best)
        np.testing.assert_allclose(output.top_logprobs[number], expected[number, best], atol=1e-5)
    assert output.ranks[0] == 2


@pytest.mark.parametrize("row", [*FILTERS, *EDITS], ids=str)
def test_processed_logprobs_are_of_the_distribution_that_is_sampled_from(
    row: dict[str, Any],
) -> None:
    own = {"position": 9, **row}
    rows = [own, {**own, "temperature": 0.0}, {**own, "reported": 5}]
    logits = np.repeat(make_logits(41), 3, axis=0)
    output = draw(
        logits, rows, previous=PREVIOUS, has_logprobs=True, logprobs_mode="processed_logprobs"
    )
    edited = edited_logits(logits[0], row).astype(np.float64)
    greedy = np.exp(edited - edited.max())
    drawn = allowed_probabilities(edited, {**row, "masked": ()})
    with np.errstate(divide="ignore"):
        expected = np.log([drawn, greedy / greedy.sum()])
    for number, token_id in enumerate(output.token_ids[:2]):
        assert output.logprobs[number] == pytest.approx(expected[number, token_id], abs=1e-5)
        assert output.ranks[number] == 1 + (expected[number] > expected[number, token_id]).sum()
        found = np.full(VOCAB, -np.inf)
        found[output.top_token_ids[number]] = output.top_logprobs[number]
        best = np.sort(expected[number])[::-1][:20]
        np.testing.assert_allclose(np.sort(found)[::-1][:20], best, atol=1e-5)
    raw = logits[2] - np.log(np.exp(logits[2].astype(np.float64)).sum())
    assert output.logprobs[2] == pytest.approx(raw[5], abs=1e-5), "a prompt's token"


def test_a_mode_of_log_probabilities_changes_no_token() -> None:
    rows = [{**row, "seed": 7, "position": 3} for row in (*FILTERS, *EDITS)]
    logits = make_logits(43, len(rows))
    raw, processed = (
        draw(logits, rows, previous=PREVIOUS, has_logprobs=True, logprobs_mode=mode)
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    np.testing.assert_array_equal(raw.token_ids, processed.token_ids)
    assert (raw.logprobs != processed.logprobs).any()


def test_logprobs_that_nobody_asked_for_are_zero() -> None:
    output = draw(make_logits(8), [{}])
    assert not output.logprobs.any()
    assert not output.top_token_ids.any()


# ---- n-grams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [False, True], ids=["read", "in flight"])
def test_no_ngram_comes_twice_as_in_hf(in_flight: bool) -> None:
    """The last token may be known to the device alone, as a row of the sample before."""
    rng = np.random.default_rng(0)
    num_banned = 0
    for _ in range(40):
        lengths = rng.integers(1, HISTORY_LEN, 4)
        sequences = [rng.integers(0, 3, length) for length in lengths]
        sizes = rng.integers(0, 6, 4)
        logits = make_logits(int(rng.integers(1000)), 4)
        # Tokens that may be banned are the most probable.
        logits[:, :3] += 20
        previous = rng.permutation(4)
        rows, last = [], np.zeros(4, np.int32)
        for number, (tokens, size) in enumerate(zip(sequences, sizes, strict=True)):
            row = {"temperature": 0.0, "ngram": int(size), "position": len(tokens)}
            if in_flight:
                row["from"] = previous[number]
                last[previous[number]] = tokens[-1]
                tokens = tokens[:-1]
            rows.append({**row, "tokens": tokens})
        drawn = draw(logits, rows, previous=tuple(last.tolist())).token_ids
        for number, (tokens, size) in enumerate(zip(sequences, sizes, strict=True)):
            scores = torch.tensor(logits[number])[None]
            if size:
                process: Any = NoRepeatNGramLogitsProcessor(int(size))
                scores = process(torch.tensor(tokens)[None], scores)
            assert drawn[number] == int(scores[0].argmax())
            num_banned += int(torch.isinf(scores).sum())
    assert num_banned > 100
