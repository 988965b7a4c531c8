"""The window of tokens that one request computes in a step, after its cached prefix.

Knows nothing of other requests, or of the token budget that they share.
"""

from collections.abc import Sequence
from dataclasses import replace

from mmjax.cache.awaited_rows import AwaitedRows
from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv.kv_cache_manager import KVCacheManager
from mmjax.cache.state_slots import StateSlots
from mmjax.engine.scheduling.request import EncoderItem, Request


class WindowFitter:
    """Fits windows to the cached KV blocks and to the room in the encoder cache."""

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        encoder_cache: EncoderCacheManager,
        keeps_runs_whole: bool,
        state_slots: StateSlots | None = None,
        keeps_snapshots: bool = False,
        awaited: AwaitedRows | None = None,
    ) -> None:
        """`state_slots` None: the model has no recurrent layers. `awaited`: as `Scheduler`."""
        self._awaited = awaited
        self._state_slots = state_slots
        self._keeps_snapshots = keeps_snapshots
        self._kv_cache = kv_cache
        self._encoder_cache = encoder_cache
        self._keeps_runs_whole = keeps_runs_whole

    def has_rows(self, request: Request) -> bool:
        """Return whether workers have given what a request needs to start; else ask for it."""
        if self._awaited is None or not request.media_items:
            return True
        if self.is_waiting(request):
            return False
        start = 0
        if request.encoder is None:
            start = self._kv_cache.count_cached_tokens(
                request.request_id, request.block_hashes, request.num_tokens
            )
        needed = [
            item
            for item in request.media_items
            if item.is_encoded
            and item.has_embeds_from(start)
            and item.identifier not in self._encoder_cache.cached
        ]
        may_ask = self._awaited.may_ask(request.request_id)
        return may_ask and self._awaited.are_here(request.request_id, needed)

    def is_waiting(self, request: Request) -> bool:
        """Return whether a request waits for what a worker encodes."""
        return self._awaited is not None and self._awaited.is_waiting(request.request_id)

    def take(self, item: EncoderItem) -> EncoderItem:
        """Return an item that is to be encoded, with its rows where a worker has given them."""
        rows = None
        if self._awaited is not None and item.is_encoded:
            rows = self._awaited.take(item.identifier)
        return item if rows is None else replace(item, embeds=rows)

    def start(self, request: Request, states_left: int) -> bool:
        """Give the request the cached blocks of its prefix, and blocks for cross-attention.

        Returns False without room for the prompt, or if the encoder's hidden states exceed
        `states_left`; the request may then hold blocks, which the caller must free.
        """
        cache, request_id = self._kv_cache, request.request_id
        num_found = cache.count_cached_tokens(request_id, request.block_hashes, request.num_tokens)
        num_blocks = num_found // cache.block_size
        if self._state_slots is not None:
            found = request.block_hashes[:num_blocks]
            num_blocks, request.found_state = self._state_slots.find(found)
        request.num_computed_tokens = cache.start(request_id, request.block_hashes[:num_blocks])
        request.num_found_tokens = request.num_computed_tokens
        if request.encoder is not None and (
            request.encoder_len > states_left
            or not cache.start_encoder(request_id, request.encoder_len)
        ):
            return False
        # Require room for the whole prompt, not only for its first chunk: else half-computed
        # prompts would preempt each other.
        return cache.has_room(request_id, request.num_tokens)

    def fit(
        self, request: Request, max_tokens: int, embeds_left: int
    ) -> tuple[int, list[EncoderItem]]:
        """Return how many tokens the request may compute, and the items to encode for them.

        A run of embeddings with bidirectional attention, or a prompt that sees itself, is computed
        in one step, or, if the prefix cache holds its beginning (which was computed with the whole
        run), from there to its end.
        Tokens around it, and the item's other runs, may be computed in other steps.
        Cached items, also those of an earlier request of this step, are referenced here.
        The hidden states of an encoder-decoder's encoder are an item of the first window.
        """
        start = request.num_computed_tokens
        end = start + max(0, min(request.num_tokens_with_in_flight - start, max_tokens))
        if start == request.num_found_tokens and request.encoder is not None:
            states = self._fit_states(request.request_id, request.encoder, embeds_left)
            return (0, []) if states is None else (end - start, states)
        end = self._cut(request, start, end)
        if start >= request.items_end:
            return end - start, []
        items = request.items_between(start, end)
        items = [item for item in items if item.has_embeds_between(start, end)]
        new, lacking = self._take_in(request.request_id, items, embeds_left)
        if lacking is not None:
            end = self._cut(request, start, lacking.start)
            if request.spans.first_ahead is not None:
                # All items go at once: requests that each held some might wait for each other.
                self._encoder_cache.free(request.request_id)
                new = []
        return end - start, new

    def _fit_states(
        self, request_id: str, states: EncoderItem, embeds_left: int
    ) -> list[EncoderItem] | None:
        """Return what must be encoded for an encoder's hidden states; None: there is no room.

        Nothing if they are cached; else the items of the prompt that are not, and the states.
        """
        assert states.prompt is not None, f"{states.identifier=} are no encoder's states"
        if self._encoder_cache.check_and_update_cache(request_id, states.identifier):
            return []
        items = (*states.prompt.items, states)
        new, lacking = self._take_in(request_id, items, embeds_left)
        return new if lacking is None else None

    def _take_in(
        self, request_id: str, items: Sequence[EncoderItem], embeds_left: int
    ) -> tuple[list[EncoderItem], EncoderItem | None]:
        """Reference what is cached of items; return the others, up to one without room, and that.

        The items before it are to be encoded; None: there is room for all.
        """
        new: dict[str, EncoderItem] = {}
        num_new = 0
        for item in items:
            name = item.identifier
            if name in new or self._encoder_cache.check_and_update_cache(request_id, name):
                continue
            if not self._may_encode(request_id, item, embeds_left - num_new, num_new):
                return list(new.values()), item
            new[name] = item
            num_new += item.num_embeds
        return list(new.values()), None

    def _may_encode(
        self, request_id: str, item: EncoderItem, embeds_left: int, num_new_embeds: int
    ) -> bool:
        """Return whether an item's output is here, or can be computed, and has room."""
        awaited = self._awaited if item.is_encoded else None
        if awaited is not None and not awaited.are_here(request_id, [item]):
            return False
        return self._encoder_cache.can_allocate(item.num_embeds, embeds_left, num_new_embeds)

    def may_end(self, request: Request, num_tokens: int) -> bool:
        """Return whether a window of so many tokens, fewer than were fitted, may be computed."""
        end = request.num_computed_tokens + num_tokens
        return request.encoder is None and end == self._cut(
            request, request.num_computed_tokens, end
        )

    def _cut(self, request: Request, start: int, end: int) -> int:
        """Return the last position in [start, end] where a window from `start` may end."""
        if self._keeps_runs_whole:
            end = request.spans.last_cut(end)
        if self._state_slots is not None:
            if self._keeps_snapshots:
                end = min([end, *(one for one in request.snapshot_places if one > start)])
            end = request.last_chunk_end(end)
        return max(start, end)

    def free_items(self, request: Request, start: int, end: int) -> None:
        """Drop the request's references to items whose last embedding is in a window.

        Not at the placeholder's end: the tokens behind them may be the next item's, too, which may
        need the room. Also to an item that occurs again later in the prompt: a reference could take
        the room that the items in between need. It stays cached until then, if there is room.
        """
        overlapping = request.items_between(start, end)
        begun = {item.identifier for item in overlapping if item.has_embeds_from(end)}
        for item in overlapping:
            if item.identifier not in begun:
                self._encoder_cache.free_encoder_input(request.request_id, item.identifier)

    def free_encoder(self, request: Request) -> None:
        """Drop the references of an encoder-decoder's first step, the only one that reads them.

        The hidden states' first: so they are evicted before the items, which others may ask for.
        """
        assert request.encoder is not None, f"{request.request_id=} has no encoder"
        for item in (request.encoder, *request.media_items):
            self._encoder_cache.free_encoder_input(request.request_id, item.identifier)
