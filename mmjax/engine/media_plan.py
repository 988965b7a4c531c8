"""What items take of a step, and of the encoder cache: planned before memory is."""

from collections.abc import Mapping
from typing import NamedTuple

from mmjax.config.engine_config import EngineConfig, SchedulerConfig
from mmjax.engine.device.encoder import choose_sizes, largest_items
from mmjax.engine.disk_caches import check_offload
from mmjax.engine.model import LoadedModel
from mmjax.errors import ConfigError
from mmjax.layers.module import bind
from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.models.host_inputs import AHEAD, HostInputs, Sees
from mmjax.processing.encoder_budget import compute_mm_encoder_budget
from mmjax.system.logger import get_logger

logger = get_logger(__name__)


class MediaPlan(NamedTuple):
    """What items take; it does not depend on memory."""

    host_inputs: HostInputs
    has_tower: bool
    sizes: Mapping[str, tuple[int, ...]]
    """Of the calls that encode items, here or elsewhere, by function."""
    takes_embeds: bool
    sees: Sees
    """What a prompt's tokens see, of what they may have."""
    keeps_runs_whole: bool
    largest_item: int
    """Embeddings that are encoded at once, at most; 0: none are."""
    encoder_budget: int
    """Embeddings that a step may encode."""
    num_encoder_rows: int
    """Embeddings that are kept."""
    max_encoder_len: int
    num_state_slots: int
    """Of recurrent layers' states; 0: the model has none."""
    states_per_seq: int
    """Of these, a request's: one, and one for each token that is guessed at once."""


def plan_media(config: EngineConfig, model: LoadedModel) -> MediaPlan:
    """Return the plan of a model; ConfigError for settings that its items do not fit."""
    schedule, module = config.scheduler, bind(model.graphdef, model.params)
    check_offload(config, has_states=bool(module.kv_cache_spec.states))
    host_inputs: HostInputs = model.model_class.host_inputs(config.model.hf_config)
    has_tower, takes_embeds = not model.left_out, config.model.mm.enable_mm_embeds
    encodes = has_tower or bool(config.cache.encoder_workers)
    has_items = encodes or takes_embeds or module.sees in ("prompt", "reference")
    sees: Sees = module.sees if has_items else "past"
    keeps_runs_whole = sees in AHEAD or schedule.disable_chunked_mm_input
    _tell_of_whole_runs(schedule, sees)
    largest: Mapping[str, int] = {}
    if encodes or takes_embeds:
        largest = largest_items(
            host_inputs.encoder_spec, config.max_embeds_per_item, config.model.max_model_len
        )
    largest_item = max(largest.values(), default=0)
    longest_clip = 0 if host_inputs.clip_spec is None else largest.get("audio", 0)
    seen = (n for m, n in largest.items() if m != "audio" or not longest_clip)
    largest_seen = max(seen, default=0)
    if module.max_encoder_len:
        check_offload(config, shares_blocks=host_inputs.attends_to_items)
        if config.model.pools:
            raise ConfigError(
                f"`runner` is 'pooling', but `{config.model.architecture}` is an encoder-decoder, "
                "or one with cross-attention to pictures, of which mmjax pools no states; leave "
                "`--runner` out"
            )
        # The items have no positions in the decoder's prompt, which alone has chunks.
        keeps_runs_whole = False
        # A request starts in one step: with the encoder's hidden states, and, of the items in
        # its prompt, at most an embedding at each place.
        largest = {"encoder": 2 * module.max_encoder_len}
    encoder_budget, encoder_rows = compute_mm_encoder_budget(
        schedule,
        largest,
        encoder_cache_size=config.cache.encoder_cache_size,
        disable_chunked_mm_input=keeps_runs_whole,
        longest_runs={m: n for m, n in largest.items() if m not in host_inputs.cut_modalities},
    )
    states_per_seq = 1 + config.num_guessed if module.kv_cache_spec.states else 0
    return MediaPlan(
        host_inputs=host_inputs,
        has_tower=has_tower,
        sizes={
            "encode": choose_sizes(host_inputs.encoder_spec, encoder_budget, largest_seen),
            "encode clips": choose_sizes(host_inputs.clip_spec, encoder_budget, longest_clip),
        }
        if encodes
        else {},
        takes_embeds=takes_embeds,
        sees=sees,
        keeps_runs_whole=keeps_runs_whole,
        largest_item=largest_item,
        encoder_budget=encoder_budget,
        num_encoder_rows=max(1, encoder_rows),
        max_encoder_len=module.max_encoder_len,
        num_state_slots=_count_state_slots(config, states_per_seq, keeps_runs_whole),
        states_per_seq=states_per_seq,
    )


def _tell_of_whole_runs(schedule: SchedulerConfig, sees: Sees) -> None:
    if sees == "prompt":
        logger.info(
            "a prompt's tokens see each other: each prompt is computed in one step, so that it may "
            "have `--max-num-batched-tokens` %d at most",
            schedule.max_num_batched_tokens,
        )
    elif sees in AHEAD and not schedule.disable_chunked_mm_input:
        logger.info("a picture's embeddings go in one step: they see each other both ways")


def _count_state_slots(config: EngineConfig, states_per_seq: int, keeps_runs_whole: bool) -> int:
    """Return the slots of states that requests and snapshots have; 0 without recurrent layers."""
    schedule, cache = config.scheduler, config.cache
    if not states_per_seq:
        return 0
    if schedule.max_num_batched_tokens < CHUNK:
        raise ConfigError(
            f"`max_num_batched_tokens` is {schedule.max_num_batched_tokens}, but the model has "
            f"recurrent layers, which compute prompts in chunks of {CHUNK} tokens: give "
            f"`--max-num-batched-tokens {CHUNK}` or more"
        )
    if keeps_runs_whole:
        raise ConfigError(
            "`disable_chunked_mm_input` is set, but the model has recurrent layers, which compute "
            "prompts in chunks that end within items, too; leave it out"
        )
    finds = cache.enable_prefix_caching and schedule.enable_chunked_prefill
    num_snapshots = cache.num_state_snapshots if finds else 0
    return schedule.max_num_seqs * states_per_seq + num_snapshots
