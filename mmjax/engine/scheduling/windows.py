"""How far a request may compute in a step: from behind its cached beginning, as its items allow.

Knows nothing of other requests and of the token budget that they share.
"""

from mmjax.cache.encoder_cache_manager import EncoderCacheManager
from mmjax.cache.kv.kv_cache_manager import KVCacheManager
from mmjax.engine.scheduling.request import EncoderItem, Request


class WindowFitter:
    """Fits windows of tokens to the KV blocks that are found and to the items that fit."""

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        encoder_cache: EncoderCacheManager,
        keeps_runs_whole: bool,
    ) -> None:
        self._kv_cache = kv_cache
        self._encoder_cache = encoder_cache
        self._keeps_runs_whole = keeps_runs_whole

    def start(self, request: Request, states_left: int) -> bool:
        """Give the request the cached blocks of its beginning, and those of its encoder's states.

        False: it lacks room, or the step room for its states; it may hold some, and must be freed.
        """
        cache, request_id = self._kv_cache, request.request_id
        num_found = cache.count_cached_tokens(request.block_hashes, request.num_tokens)
        request.num_computed_tokens = cache.start(
            request_id, request.block_hashes[: num_found // cache.block_size]
        )
        if request.encoder is not None and (
            request.encoder_len > states_left
            or not cache.start_encoder(request_id, request.encoder_len)
        ):
            return False
        # All blocks of the prompt must be free, not only the first chunk's: else half-computed
        # prompts would preempt each other.
        return cache.has_room(request_id, request.num_tokens)

    def fit(
        self, request: Request, max_tokens: int, embeds_left: int
    ) -> tuple[int, list[EncoderItem]]:
        """Return how many tokens the request may compute, and the items to encode for them.

        A run of embeddings that see each other both ways is computed whole, or to its end where
        its beginning was found: that was computed with the whole in view, and the rest sees it.
        Marks around it, and an item's other runs, may go in other steps.
        Items that are cached, also by an earlier request of this step, are referenced here.
        The encoder of an encoder-decoder is such an item, of the request's first window.
        """
        start = request.num_computed_tokens
        end = start + max(0, min(request.num_tokens_in_all - start, max_tokens))
        new: dict[str, EncoderItem] = {}
        num_new_embeds = 0
        if start == 0 and request.encoder is not None:
            item = request.encoder.item
            if not self._encoder_cache.check_and_update_cache(request.request_id, item.identifier):
                if not self._encoder_cache.can_allocate(item.num_embeds, embeds_left):
                    return 0, []
                new[item.identifier] = item
                num_new_embeds = item.num_embeds
        if start >= request.items_end:
            return end - start, list(new.values())
        end = self._cut(request, start, end)
        for item in request.items_between(start, end):
            first, last = item.mm_position.get_embeds_indices_in_range(
                max(0, start - item.start), min(end, item.end) - item.start
            )
            if first == last or item.identifier in new:
                continue
            if self._encoder_cache.check_and_update_cache(request.request_id, item.identifier):
                continue
            if not self._encoder_cache.can_allocate(
                item.num_embeds, embeds_left - num_new_embeds, num_new_embeds
            ):
                return self._cut(request, start, item.start) - start, list(new.values())
            new[item.identifier] = item
            num_new_embeds += item.num_embeds
        return end - start, list(new.values())

    def _cut(self, request: Request, start: int, end: int) -> int:
        """Return the last place in [start, end] where a window from `start` may end."""
        return max(start, request.last_cut(end) if self._keeps_runs_whole else end)

    def let_go_of_items(self, request: Request, start: int, end: int) -> None:
        """Let go of the items that lie behind a window.

        An item that comes again further on is let go as well: held, it could take the room that
        the items between need. It stays cached as long as nobody needs its room.
        """
        overlapping = request.items_between(start, end)
        begun = {item.identifier for item in overlapping if item.end > end}
        for item in overlapping:
            if item.identifier not in begun:
                self._encoder_cache.free_encoder_input(request.request_id, item.identifier)

    def let_go_of_encoder(self, request: Request) -> None:
        """Let go of an encoder's states: the first step makes keys and values of them, for all."""
        assert request.encoder is not None, f"{request.request_id=} has no encoder"
        identifier = request.encoder.item.identifier
        self._encoder_cache.free_encoder_input(request.request_id, identifier)
