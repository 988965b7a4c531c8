"""Which tokens a request may be given next: grammars of structured outputs, lists, biases, bans.

Grammars are computed in threads of their own, so that no step waits for one: a request is scheduled
again once its grammar has read its last token. Knows nothing of the device: token ids in, bits and
pairs of ids out.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mmjax.cache.media.lru import LRUCache
from mmjax.errors import InternalError, RequestError, RequestRuntimeError, RequestValueError
from mmjax.params.sampling_params import SamplingParams, TranscriptRules
from mmjax.params.structured_outputs import STACK_BYTES, make_limits, shorten
from mmjax.system.logger import get_logger
from mmjax.system.threads import DeepStackPool
from mmjax.transport.messages import EngineCoreRequest

logger = get_logger(__name__)

NUM_THREADS = 2
CACHE_CHARS = 2**20
"""Texts of the grammars that are kept as they are before their first token."""
_PARAM = "structured_outputs"


def pack_token_ids(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return int32[words] with a bit set for each id: token 33 is bit 1 of word 1.

    0 and 33 of 40 give 1 and 2.
    """
    is_allowed = np.zeros(vocab_size, bool)
    is_allowed[list(token_ids)] = True
    return _pack(is_allowed)


def _pack(is_allowed: np.ndarray) -> np.ndarray:
    padded = np.pad(is_allowed, (0, -len(is_allowed) % 32))
    return np.packbits(padded, bitorder="little").view("<i4")


class Grammar:
    """The state of one request's grammar. Only the engine's thread calls it."""

    def __init__(
        self,
        submit: "Callable[[Callable[[], np.ndarray]], Future[np.ndarray]]",
        make_matcher: Callable[[], Any],
        usable_bits: np.ndarray,
        *,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Begin to find the tokens after `output_token_ids`, in another thread.

        `usable_bits`: int32[words], of the tokens that may be sampled as far as others say.
        """
        self._submit = submit
        self._usable_bits = usable_bits
        self._matcher: Any = None
        self._job = submit(partial(self._start, make_matcher, output_token_ids))

    @property
    def has_next(self) -> bool:
        """Whether `allowed_bits` are those of the next token."""
        return self._job.done() and self._job.exception() is None

    def is_ready_by(self, deadline: float) -> bool:
        """Wait until `allowed_bits` are those of the next token; False: they are not in time.

        `deadline`: in `time.monotonic()` seconds.
        """
        wait([self._job], max(0.0, deadline - time.monotonic()))
        return self.has_next

    @property
    def error(self) -> RequestError | None:
        """Why the grammar cannot go on; None while it is not known to fail."""
        error = self._job.exception() if self._job.done() else None
        if error is None or isinstance(error, RequestError):
            return error
        logger.error("a grammar failed", exc_info=error)
        return InternalError("internal error in a grammar")

    @property
    def allowed_bits(self) -> np.ndarray:
        """int32[words]: a bit for each token that may come next; of one at least."""
        return self._job.result()

    def advance(self, token_id: int) -> None:
        """Begin to read a token, in another thread."""
        assert self.has_next, "its last token was read before it was scheduled"
        self._job = self._submit(partial(self._read, token_id))

    def _start(
        self, make_matcher: Callable[[], Any], output_token_ids: Sequence[int]
    ) -> np.ndarray:
        self._matcher = make_matcher()
        if output_token_ids and not self._matcher.consume_tokens(list(output_token_ids)):
            raise RequestValueError(
                f"the tokens that were generated already do not match `{_PARAM}`; give those of "
                "the same request",
                param=_PARAM,
            )
        return self._find_bits()

    def _read(self, token_id: int) -> np.ndarray:
        if not self._matcher.consume_token(token_id):
            raise RuntimeError(f"token {token_id} was sampled, and not allowed by the grammar")
        return self._find_bits()

    def _find_bits(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            raise RequestRuntimeError(
                f"`{_PARAM}` cannot go on ({shorten(self._matcher.get_error())}); make it simpler",
                param=_PARAM,
            )
        bits = bits[: len(self._usable_bits)] & self._usable_bits
        if not bits.any():
            # Before a sample, which would have nothing to choose from, and NaN for probabilities.
            raise RequestRuntimeError(
                f"no token that `{_PARAM}` allows here may be sampled; check it against "
                "`allowed_token_ids`",
                param=_PARAM,
            )
        return bits


class Transcript:
    """What may come next in a transcript: a grammar that needs no thread.

    As `WhisperTimeStampLogitsProcessor` of transformers, but for what depends on probabilities,
    which is the sampler's.
    """

    has_next = True
    error: RequestError | None = None

    def __init__(
        self,
        rules: TranscriptRules,
        vocab_size: int,
        *,
        output_token_ids: Sequence[int] = (),
        allowed_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Read the tokens so far; the other arguments are those of `Grammars.start`."""
        self._rules = rules
        self._is_usable = np.ones(vocab_size, bool)
        if allowed_token_ids is not None:
            self._is_usable[:] = False
            self._is_usable[list(allowed_token_ids)] = True
        self._is_usable[list(rules.suppressed_token_ids)] = False
        self._first = vocab_size if rules.timestamps_from is None else rules.timestamps_from
        if rules.timestamps_from is not None:
            self._is_usable[self._first - 1] = False  # the token that asks for none
        self._num_read = 0
        self._were_times = (True, False)
        """Whether the token before the last was a timestamp, and the last: before the second token
        the former counts as one."""
        self._last_time: int | None = None
        for token_id in output_token_ids:
            self.advance(token_id)

    def is_ready_by(self, deadline: float) -> bool:
        """Return True: nothing is computed in another thread."""
        return True

    def advance(self, token_id: int) -> None:
        """Read a token."""
        is_time = token_id >= self._first
        self._were_times = (not self._num_read or self._were_times[1], is_time)
        self._num_read += 1
        if is_time:
            self._last_time = token_id

    @property
    def allowed_bits(self) -> np.ndarray:
        """int32[words]: a bit for each token that may come next."""
        is_allowed = self._is_usable.copy()
        if not self._num_read:
            is_allowed[list(self._rules.first_suppressed_token_ids)] = False
        if self._rules.timestamps_from is not None:
            self._keep_order(is_allowed)
        return _pack(is_allowed)

    def _keep_order(self, is_allowed: np.ndarray) -> None:
        if not self._num_read:
            is_allowed[: self._first] = False
            if self._rules.last_first_timestamp is not None:
                is_allowed[self._rules.last_first_timestamp + 1 :] = False
            return
        was_time_before, was_time = self._were_times
        if was_time and was_time_before:
            is_allowed[self._first :] = False
        elif was_time:
            is_allowed[: self._rules.eos_token_id] = False
        if self._last_time is not None:
            # The second of a pair may be the first's.
            is_second = was_time and not was_time_before
            is_allowed[self._first : self._last_time + (not is_second)] = False


class Grammars:
    """Makes the grammars of one engine's requests."""

    def __init__(self, load_tokenizer: Callable[[], Any], vocab_size: int) -> None:
        """Load nothing: the vocabulary is read for the first grammar, which takes a second or so.

        Args:
            load_tokenizer: Returns HF's.
            vocab_size: Tokens that have a logit.
        """
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._all_bits = pack_token_ids(range(vocab_size), vocab_size)
        self._pool = DeepStackPool(
            NUM_THREADS, stack_bytes=STACK_BYTES, thread_name_prefix="mmjax-grammar"
        )
        self._pending: set[Future[np.ndarray]] = set()
        self._lock = threading.Lock()
        self._vocabularies: dict[tuple[int, ...], Any] = {}
        """By the tokens that end a text."""
        self._started: LRUCache[tuple[tuple[int, ...], str], Any] = LRUCache(
            CACHE_CHARS, getsizeof=_count_chars
        )

    def start_for(self, message: EngineCoreRequest) -> Grammar | Transcript | None:
        """Return what a request's answer must match, after its tokens so far; None: nothing."""
        params, output = message.sampling_params, message.output_token_ids
        allowed = params.allowed_token_ids
        if message.grammar is not None:
            ends = message.eos_token_ids
            return self.start(message.grammar, ends, output, allowed_token_ids=allowed)
        if params.transcript is None:
            return None
        size = self._vocab_size
        return Transcript(
            params.transcript, size, output_token_ids=output, allowed_token_ids=allowed
        )

    def start(
        self,
        text: str,
        eos_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        *,
        allowed_token_ids: Sequence[int] | None = None,
    ) -> Grammar:
        """Return the grammar of a request, which is not ready yet, after its tokens so far.

        `allowed_token_ids`: the only ones that may be sampled; None: all that have a logit.
        """
        usable_bits = self._all_bits
        if allowed_token_ids is not None:
            usable_bits = pack_token_ids(allowed_token_ids, self._vocab_size)
        return Grammar(
            self._submit,
            partial(self._make_matcher, text, tuple(eos_token_ids)),
            usable_bits,
            output_token_ids=output_token_ids,
        )

    @property
    def pending(self) -> list["Future[np.ndarray]"]:
        """What reads tokens now, or begins to."""
        return list(self._pending)

    def close(self) -> None:
        """Start no more jobs, without waiting for running ones. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, job: Callable[[], np.ndarray]) -> "Future[np.ndarray]":
        future = self._pool.submit(job)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _make_matcher(self, text: str, eos_token_ids: tuple[int, ...]) -> Any:
        from llguidance import LLMatcher

        with self._lock:
            started = self._started.get((eos_token_ids, text))
            if started is None:
                vocabulary = self._find_vocabulary(eos_token_ids)
                started = _Started(text, LLMatcher(vocabulary, text, limits=make_limits()))
                self._started[eos_token_ids, text] = started
            matcher = started.matcher.deep_copy()
        if matcher.is_error():
            raise RequestValueError(
                f"`{_PARAM}` cannot be used: {shorten(matcher.get_error())}; mend it",
                param=_PARAM,
            )
        return matcher

    def _find_vocabulary(self, eos_token_ids: tuple[int, ...]) -> Any:
        """Return llguidance's tokenizer, over as many tokens as the model or HF's has."""
        from llguidance.hf import from_tokenizer

        found = self._vocabularies.get(eos_token_ids)
        if found is None:
            tokenizer = self._load_tokenizer()
            num_tokens = max(self._vocab_size, max(tokenizer.get_vocab().values()) + 1)
            eos = list(eos_token_ids)
            found = from_tokenizer(copy.copy(tokenizer), n_vocab=num_tokens, eos_token=eos)
            self._vocabularies[eos_token_ids] = found
        return found


class _Started(NamedTuple):
    """A grammar before its first token."""

    text: str
    matcher: Any


def _count_chars(started: _Started) -> int:
    # What little ones take besides.
    return 4096 + len(started.text)


class LogitRules:
    """The allowed tokens, bad words, biases and grammar of one request."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int = 0,
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        has_grammar: bool = False,
    ) -> None:
        """`vocab_size`: tokens that have a logit; those that `params` allow are among them."""
        self.has_grammar = has_grammar or params.transcript is not None
        """Whether what may come next depends on the token before."""
        self.grammar: Grammar | Transcript | None = None
        """What the answer must match; it, and nothing else, says where the answer may end. It is
        set when the request waits, since its threads then begin."""
        self.biases = params.logit_bias or {}
        self.has_edits = bool(bad_words_token_ids or self.biases)
        """Whether single logits are changed."""
        self._bad_words_token_ids = bad_words_token_ids
        self._listed_bits = None
        if params.allowed_token_ids is not None:
            self._listed_bits = pack_token_ids(params.allowed_token_ids, vocab_size)

    def is_ready_by(self, deadline: float) -> bool:
        """Wait until `allowed_bits` are those of the next token; False: they are not in time."""
        return self.grammar is None or self.grammar.is_ready_by(deadline)

    @property
    def has_mask(self) -> bool:
        """Whether not every token may come."""
        return self.has_grammar or self._listed_bits is not None

    @property
    def allowed_bits(self) -> np.ndarray | None:
        """int32[words]: a bit for each token that may be the next; None: any may."""
        return self._listed_bits if self.grammar is None else self.grammar.allowed_bits

    def find_bans(
        self, output: Sequence[int] | np.ndarray, *, is_last_known: bool
    ) -> list[tuple[int, int]]:
        """Return which tokens would complete bad words: (token before or -1, banned token).

        If the last token is in flight, and so not in `output`, it is to be compared with the first
        of a pair; -1 stands for any. Of bad words 5 6 7 and 8, behind 5 and a token in flight:
        (6, 7), (-1, 8).
        """
        num_output = len(output) + (not is_last_known)
        bans = []
        for word in self._bad_words_token_ids:
            *before, last = word
            if len(before) > num_output:
                continue
            awaited = -1 if is_last_known or not before else before.pop()
            if not before or list(output[-len(before) :]) == before:
                bans.append((awaited, last))
        return bans
