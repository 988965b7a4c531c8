"""Tables that few samples need: histories, masks of allowed tokens, biases and bans."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mmjax.engine.device.batch_layout import NO_TOKEN
from mmjax.engine.scheduling.outputs import ScheduledRequest
from mmjax.requests.sampling_params import MAX_BAD_WORD_SEQUENCES, MAX_BIASES, MAX_STOP_TOKEN_IDS
from mmjax.rounding import cdiv


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
            history[row, : request.num_tokens] = request.token_ids[: request.num_tokens]
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
