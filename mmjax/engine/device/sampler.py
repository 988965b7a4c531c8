"""Sampling on the device. A row's token is a function of its (logits, seed, position) alone.

Which branch runs may depend on the other rows of the batch; a row's result does not.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mmjax.config.engine_config import LogprobsMode
from mmjax.engine.device.batch import NO_TOKEN, SampleBatch
from mmjax.engine.scheduling.outputs import ScheduledRequest
from mmjax.params.sampling_params import (
    MAX_BAD_WORD_SEQUENCES,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
)
from mmjax.rounding import cdiv
from mmjax.transport.messages import TokenLogprobs

_GROUP = 64
"""Token ids per group in the argmax's first stage, if it divides the vocabulary."""
_MIN_TEMPERATURE = 1e-5
"""Lower temperatures give the argmax, too; dividing by them would overflow float32."""


class SampleOutput(NamedTuple):
    """What the host reads; all but `token_ids` is 0 unless a request wants it."""

    token_ids: Int[Array, " R"]
    logprobs: Float[Array, " R"]
    """Those of the sampled or reported tokens, of the distribution that `logprobs_mode` says."""
    ranks: Int[Array, " R"]
    """Ranks of these tokens by probability, from 1."""
    top_token_ids: Int[Array, "R W"]
    top_logprobs: Float[Array, "R W"]

    def read(self, row: int, token_id: int, num_wanted: int) -> TokenLogprobs:
        """Return a row's log-probabilities, once they are on the host: its token's come first."""
        return TokenLogprobs(
            token_ids=[token_id, *self.top_token_ids[row, :num_wanted].tolist()],
            logprobs=[float(self.logprobs[row]), *self.top_logprobs[row, :num_wanted].tolist()],
            sampled_rank=int(self.ranks[row]),
        )


def read_logprobs(
    reported: Sequence[SampleOutput], token_ids: Sequence[int], num_wanted: int, vocab_size: int
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of tokens, which are those of the samples' rows in order.

    None for a token that has no logit.
    """
    logprobs: list[TokenLogprobs | None] = []
    for drawn in reported:
        part = token_ids[len(logprobs) : len(logprobs) + len(drawn.ranks)]
        logprobs += [
            drawn.read(row, token_id, num_wanted) if token_id < vocab_size else None
            for row, token_id in enumerate(part)
        ]
    return logprobs


# ---- what few samples need -----------------------------------------------------------------------


class SampleTables(NamedTuple):
    """What some rows of a sample need besides; without such rows a table stays as it is.

    On the host numpy's, and None for a table that no row needs.
    """

    history: Any
    """int32[R, S]: the tokens that are known, of rows with penalties or an n-gram size."""
    masks: Any
    """int32[R, words]: a bit for each token that may be sampled; token 33 is bit 1 of word 1."""
    edits: Any
    """int32[R, EDIT_WIDTH]: as `Edits`, one behind the other."""


class Edits(NamedTuple):
    """Changes of single logits of a row; padding is `NO_TOKEN`."""

    last_token_ids: Int[Array, "R _words"]
    """The token in flight behind which another is banned; -1: whatever it is."""
    banned_token_ids: Int[Array, "R _words"]
    biased_token_ids: Int[Array, "R _biases"]
    biases: Float[Array, "R _biases"]


MAX_BANS = MAX_BAD_WORD_SEQUENCES + MAX_STOP_TOKEN_IDS
EDIT_WIDTH = 2 * MAX_BANS + 2 * MAX_BIASES


def unpack_edits(edits: Int[Array, "R _width"]) -> Edits:
    """Return the parts of `SampleTables.edits`, under jit."""
    ends = np.cumsum([MAX_BANS, MAX_BANS, MAX_BIASES])
    last, banned, biased, biases = jnp.split(edits, ends, axis=1)
    return Edits(last, banned, biased, jax.lax.bitcast_convert_type(biases, jnp.float32))


def empty_tables(num_rows: int, history_len: int, vocab_size: int) -> SampleTables:
    """Return tables that ask for nothing."""
    return SampleTables(
        history=np.zeros((num_rows, history_len), np.int32),
        masks=np.full((num_rows, cdiv(vocab_size, 32)), -1, np.int32),
        edits=np.full((num_rows, EDIT_WIDTH), NO_TOKEN, np.int32),
    )


def make_tables(requests: Sequence[ScheduledRequest], empty: SampleTables) -> SampleTables:
    """Return the tables of requests that need any, None for the others.

    `empty`: of the sample's number of rows.
    """
    history = masks = edits = None
    for row, scheduled in enumerate(requests):
        request, params = scheduled.request, scheduled.request.sampling_params
        if params.no_repeat_ngram_size or params.has_penalties:
            history = empty.history.copy() if history is None else history
            history[row, : scheduled.end] = request.token_ids[: scheduled.end]
        if request.logit_rules.has_mask:
            masks = empty.masks.copy() if masks is None else masks
            masks[row] = request.logit_rules.allowed_bits
        if request.has_edits(scheduled.end):
            edits = empty.edits.copy() if edits is None else edits
            _fill_edits(edits[row], scheduled)
    return SampleTables(history, masks, edits)


def _fill_edits(edits: np.ndarray, scheduled: ScheduledRequest) -> None:
    request, biases = scheduled.request, scheduled.request.logit_rules.biases
    bans = request.find_bans(scheduled.end, is_last_known=scheduled.token_from < 0)
    edits[: len(bans)] = [last for last, _ in bans]
    edits[MAX_BANS : MAX_BANS + len(bans)] = [token_id for _, token_id in bans]
    start = 2 * MAX_BANS
    edits[start : start + len(biases)] = list(biases)
    start += MAX_BIASES
    edits.view(np.float32)[start : start + len(biases)] = list(biases.values())


# ---- sampling ------------------------------------------------------------------------------------


def sample_greedy(logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Return the most probable tokens; of equals, the lowest id.

    In two stages, the larger one a plain maximum: XLA's CPU backend does not vectorise an argmax.
    """
    rows, vocab_size = logits.shape
    groups = logits.reshape(rows, -1, math.gcd(vocab_size, _GROUP))
    best = jnp.argmax(groups.max(-1), axis=-1)
    inside = jnp.take_along_axis(groups, best[:, None, None], axis=1)[:, 0]
    token_ids = best * groups.shape[2] + jnp.argmax(inside, axis=-1)
    return token_ids.astype(jnp.int32)


def sample_full(
    logits: Float[Array, "R V"],
    batch: SampleBatch,
    tables: SampleTables,
    previous: Int[Array, " sampled"],
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> SampleOutput:
    """Edit the logits, sample, and compute log-probabilities.

    In the order of vLLM's sampler (v1/sample/sampler.py): masks, bad words, `min_tokens`, biases,
    penalties, temperature, min-p, top-k and top-p. Raw log-probabilities are of the logits before,
    but for a grammar's mask; processed ones of what is sampled from, where a token that cannot be
    has -inf. As in vLLM, a greedy row has neither temperature nor filters, and those of a prompt's
    tokens are raw.

    `previous`: the last sample, with the tokens that the host has not read.
    """
    masked = jax.lax.cond(
        batch.has_masks > 0, lambda: _keep_allowed(logits, tables.masks), lambda: logits
    )
    masked = jax.lax.cond(
        (batch.timestamps_from > 0).any(),
        lambda: _prefer_timestamps(masked, batch.timestamps_from),
        lambda: masked,
    )
    edited = _ban(masked, batch, tables, previous)
    edited = jax.lax.cond(
        batch.has_penalties > 0,
        lambda: _penalize(edited, batch, tables.history, previous),
        lambda: edited,
    )
    is_random = batch.temperature > 0
    has_processed = logprobs_mode == "processed_logprobs"

    def draw() -> tuple[Int[Array, " R"], Float[Array, "R V"] | None]:
        kept = _filter(edited, batch)
        return _draw(kept, batch), kept if has_processed else None

    drawn, kept = jax.lax.cond(
        is_random.any(),
        draw,
        lambda: (jnp.zeros_like(batch.rows), edited if has_processed else None),
    )
    token_ids = jnp.where(is_random, drawn, sample_greedy(edited))
    if kept is None:
        shown = jnp.where((batch.reports_masked > 0)[:, None], masked, logits)
    else:
        processed = jnp.where(is_random[:, None], kept, edited)
        shown = jnp.where((batch.reported > 0)[:, None], logits, processed)
    wanted = jnp.where(batch.reported > 0, batch.reported - 1, token_ids)
    reports = jax.lax.cond(
        batch.has_logprobs > 0,
        lambda: _report(shown, wanted),
        lambda: jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(_report, shown, wanted),
        ),
    )
    return SampleOutput(token_ids, *reports)


def _keep_allowed(
    logits: Float[Array, "R V"], masks: Int[Array, "R _words"]
) -> Float[Array, "R V"]:
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    is_allowed = bits.reshape(len(masks), -1)[:, : logits.shape[1]] > 0
    return jnp.where(is_allowed, logits, -jnp.inf)


def _prefer_timestamps(
    logits: Float[Array, "R V"], timestamps_from: Int[Array, " R"]
) -> Float[Array, "R V"]:
    """Keep timestamps alone where all together are more probable than any one other token.

    As the last rule of `WhisperTimeStampLogitsProcessor` of transformers.
    """
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    is_time = token_ids >= timestamps_from[:, None]
    of_times = jax.nn.logsumexp(jnp.where(is_time, logits, -jnp.inf), axis=-1)
    best_other = jnp.where(is_time, -jnp.inf, logits).max(-1)
    is_wanted = (timestamps_from > 0) & (of_times > best_other)
    return jnp.where(is_wanted[:, None] & ~is_time, -jnp.inf, logits)


def _ban(
    masked: Float[Array, "R V"],
    batch: SampleBatch,
    tables: SampleTables,
    previous: Int[Array, " sampled"],
) -> Float[Array, "R V"]:
    """Mask single tokens, and add biases; a row that would have no token left stays as it is.

    So a grammar that has only its end left may end the text before `min_tokens`.
    """
    each_row = jnp.arange(len(masked), dtype=jnp.int32)[:, None]

    def edit() -> Float[Array, "R V"]:
        edits = unpack_edits(tables.edits)
        is_met = (edits.last_token_ids < 0) | (
            edits.last_token_ids == _in_flight(batch, previous)[:, None]
        )
        banned = jnp.where(is_met, edits.banned_token_ids, NO_TOKEN)
        biased = masked.at[each_row, edits.biased_token_ids].add(edits.biases, mode="drop")
        return biased.at[each_row, banned].set(-jnp.inf, mode="drop")

    edited = jax.lax.cond(batch.has_edits > 0, edit, lambda: masked)
    edited = edited.at[each_row, batch.masked_token_ids].set(-jnp.inf, mode="drop")
    edited = jax.lax.cond(
        (batch.ngram_sizes > 0).any(),
        lambda: _mask_repeated_ngrams(edited, batch, tables.history, previous),
        lambda: edited,
    )
    is_left = edited.max(-1, keepdims=True) > -jnp.inf
    return jnp.where(is_left, edited, masked)


def _in_flight(batch: SampleBatch, previous: Int[Array, " sampled"]) -> Int[Array, " R"]:
    """Return each row's last token, of rows where the host has not read it."""
    return previous[jnp.maximum(batch.token_from, 0)]


def _known_tokens(
    batch: SampleBatch, history: Int[Array, "R S"], previous: Int[Array, " sampled"]
) -> Int[Array, "R S"]:
    """Return the history with the tokens in flight in it."""
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    is_last = place == batch.positions[:, None] - 1
    is_in_flight = is_last & (batch.token_from >= 0)[:, None]
    return jnp.where(is_in_flight, _in_flight(batch, previous)[:, None], history)


def _penalize(
    logits: Float[Array, "R V"],
    batch: SampleBatch,
    history: Int[Array, "R S"],
    previous: Int[Array, " sampled"],
) -> Float[Array, "R V"]:
    """Apply the three penalties, as vLLM's `apply_penalties` (model_executor/layers/utils.py)."""
    tokens = _known_tokens(batch, history, previous)
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    each_row = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
    is_known = place < batch.positions[:, None]
    is_output = is_known & (place >= batch.prompt_lengths[:, None])
    counts = jnp.zeros(logits.shape, jnp.int32)
    seen = counts.at[each_row, jnp.where(is_known, tokens, NO_TOKEN)].set(1, mode="drop")
    counts = counts.at[each_row, jnp.where(is_output, tokens, NO_TOKEN)].add(1, mode="drop")
    has_any = (batch.repetition_penalty > 0)[:, None]
    repetition = jnp.where(has_any & (seen > 0), batch.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - batch.frequency_penalty[:, None] * counts.astype(logits.dtype)
    return logits - batch.presence_penalty[:, None] * (counts > 0).astype(logits.dtype)


def _mask_repeated_ngrams(
    logits: Float[Array, "R V"],
    batch: SampleBatch,
    history: Int[Array, "R S"],
    previous: Int[Array, " sampled"],
) -> Float[Array, "R V"]:
    """Mask tokens that would end an n-gram which the sequence has already.

    Of size 3, behind 5 6 7 5 6: 7. As HF's NoRepeatNGramLogitsProcessor, or within the last tokens
    alone, as Unlimited-OCR's (HF: generation_unlimited_ocr.py).
    """
    size, length = batch.ngram_sizes[:, None], batch.positions[:, None]
    window = batch.ngram_windows[:, None]
    first = jnp.where(window > 0, length - window, 0)
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    tokens = _known_tokens(batch, history, previous)

    def compare(offset: Int[Array, ""], is_same: Bool[Array, "R S"]) -> Bool[Array, "R S"]:
        """Compare the token `offset` behind each place with that of the last, partial n-gram."""
        last = jnp.take_along_axis(tokens, jnp.maximum(length - size + 1 + offset, 0), axis=1)
        return is_same & ((jnp.roll(tokens, -offset, axis=1) == last) | (offset >= size - 1))

    ends = place + size - 1
    is_same = (size > 0) & (place >= first) & (ends < length)
    is_same = jax.lax.fori_loop(0, batch.ngram_sizes.max() - 1, compare, is_same)
    ending = jnp.take_along_axis(tokens, jnp.minimum(ends, history.shape[1] - 1), axis=1)
    each_row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    masked = jnp.where(is_same, ending, NO_TOKEN)
    return logits.at[each_row, masked].set(-jnp.inf, mode="drop")


def _filter(logits: Float[Array, "R V"], batch: SampleBatch) -> Float[Array, "R V"]:
    """Divide by the temperature, and keep what top-k, top-p and min-p leave."""
    temperature = jnp.maximum(batch.temperature, _MIN_TEMPERATURE)[:, None]
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature
    threshold = jax.lax.cond(
        batch.has_filters > 0,
        lambda: _threshold(scaled, batch),
        lambda: jnp.full(scaled.shape[:1], -jnp.inf, scaled.dtype),
    )
    return jnp.where(scaled >= threshold[:, None], scaled, -jnp.inf)


def _draw(kept: Float[Array, "R V"], batch: SampleBatch) -> Int[Array, " R"]:
    """Sample by the Gumbel-max trick."""
    keys = jax.vmap(jax.random.fold_in)(
        jax.random.wrap_key_data(batch.seeds, impl="threefry2x32"), batch.positions
    )
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (kept.shape[1],), jnp.float32))(keys)
    return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)


def _threshold(scaled: Float[Array, "R V"], batch: SampleBatch) -> Float[Array, " R"]:
    """Return the lowest score that passes the filters; scores equal to it pass as well.

    In descending order each filter keeps a prefix: min-p, then top-k, then top-p of the
    probability that these two leave. A row without filters keeps everything.
    """
    ordered = -jnp.sort(-scaled, axis=-1)
    place = jnp.arange(scaled.shape[1], dtype=jnp.int32)[None, :]
    # The highest score is 0, so exp(score) is the probability relative to the highest.
    num_likely = (ordered >= jnp.log(batch.min_p)[:, None]).sum(-1, dtype=jnp.int32)
    num_top = jnp.where(batch.top_k > 0, batch.top_k, scaled.shape[1])
    in_prefix = place < jnp.minimum(num_likely, num_top)[:, None]
    weights = jnp.where(in_prefix, jnp.exp(ordered), 0.0)
    before = jnp.cumsum(weights, axis=-1) - weights
    allowance = (batch.top_p * weights.sum(-1))[:, None]
    # top_p = 1 keeps the tail that rounding in the sums would cut off.
    survives = in_prefix & ((before < allowance) | (batch.top_p >= 1)[:, None])
    last = jnp.maximum(survives.sum(-1, dtype=jnp.int32) - 1, 0)
    return jnp.take_along_axis(ordered, last[:, None], axis=-1)[:, 0]


def _report(
    logits: Float[Array, "R V"], token_ids: Int[Array, " R"]
) -> tuple[Float[Array, " R"], Int[Array, " R"], Int[Array, "R _width"], Float[Array, "R _width"]]:
    """Return the tokens' log-probabilities and ranks, and each row's most probable tokens."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)
    ranks = (logprobs > own).sum(-1, dtype=jnp.int32) + 1
    top, top_ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    return own[:, 0], ranks, top_ids.astype(jnp.int32), top
