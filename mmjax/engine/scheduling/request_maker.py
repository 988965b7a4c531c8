"""Make a scheduler's request of what the API server sent: checked, and its items in units."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from mmjax.cache.kv.block_hash import make_none_hash
from mmjax.config.engine_config import EngineConfig
from mmjax.engine.scheduling.adapters import Adapters, RegisteredAdapter
from mmjax.engine.scheduling.admission import (
    AdmissionLimits,
    check_is_served,
    check_places,
    check_shapes,
)
from mmjax.engine.scheduling.logit_rules import LogitRules
from mmjax.engine.scheduling.request import (
    BlockHasher,
    EncoderItem,
    EncoderPrompt,
    Request,
    join_rows,
)
from mmjax.errors import RequestRuntimeError, RequestTypeError, RequestValueError
from mmjax.models.host_inputs import HostInputs, PackedEncoderSpec, PromptItem, RotaryPositions
from mmjax.processing.items.embeddings import EMBEDS_DTYPES
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, PlaceholderRange
from mmjax.transport.messages import EngineCoreRequest


class RequestMaker:
    """Makes requests; knows the model's limits, and the shapes that its encoder was compiled for.

    Refuses with a `RequestError` whatever would fail in a step, which computes many requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        limits: AdmissionLimits,
        host_inputs: HostInputs,
        embed_width: int,
        dtype: Any,
        adapters: Adapters,
    ) -> None:
        """`embed_width` and `dtype` are of the rows that items' embeddings are kept in."""
        self._config = config
        self.limits = limits
        self._host_inputs = host_inputs
        self._embed_width, self._dtype = embed_width, np.dtype(dtype)
        self._adapters = adapters
        self._has_priorities = config.scheduler.scheduling_policy == "priority"
        self._encoder_numbers = count()
        self._item_suffix = self._last_suffix = ""
        """Behind the identifiers of items that the present towers, or those before, encode."""
        # A directory's blocks are found by later processes; the directory knows their weights.
        seed = None if config.cache.kv_offload_dir is None else "directory"
        self.block_hasher = self._make_block_hasher(seed)

    def make(
        self, message: EngineCoreRequest, features: Sequence[MultiModalFeatureSpec]
    ) -> Request:
        """Return a request that was checked by itself; changes nothing.

        `features`: the message's, with their tensors.
        """
        limits, params = self.limits, message.sampling_params
        check_is_served(
            message,
            has_encoder=bool(limits.max_encoder_len) and not self._host_inputs.attends_to_items,
            has_adapters=self._config.lora.enable_lora,
            pools=self._config.model.pools,
        )
        check_places(features)
        adapter = None if message.lora_name is None else self._adapters.find(message.lora_name)
        items = [self._make_item(feature, adapter) for feature in features]
        encoder, rotary, attended = None, None, list[EncoderItem]()
        if self._host_inputs.attends_to_items:
            encoder, attended, items = self._join_rows(items), items, []
        elif limits.max_encoder_len:
            encoder = self._make_encoder(message, features, items)
            items = []
        else:
            rotary = self._find_positions(message.prompt_token_ids, features)
        limits.check_prompt(message.prompt_token_ids, items)
        limits.check_sampling(message)
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            output_token_ids=message.output_token_ids,
            sampling_params=params,
            max_model_len=self._config.model.max_model_len,
            items=items,
            encoder=encoder,
            attended=attended,
            rotary=rotary,
            eos_token_ids=message.eos_token_ids,
            priority=message.priority if self._has_priorities else 0,
            cache_salt=message.cache_salt,
            lora_request=adapter,
            # All of the prompt is computed where something of each token is wanted, as in vLLM.
            block_hasher=None if params.reads_prompt else self.block_hasher,
            sees=limits.sees,
            logit_rules=LogitRules(
                params,
                vocab_size=limits.vocab_size,
                bad_words_token_ids=message.bad_words_token_ids,
                has_grammar=message.grammar is not None,
            ),
        )
        self.limits.check_request(request)
        return request

    def change_weights(self, version: int, *, has_new_tower: bool) -> None:
        """Give other keys to what is computed from now on.

        Blocks of keys and values get those of a version; items' embeddings, too, where the
        parameters have changed that they are computed with.
        """
        self.block_hasher = self._make_block_hasher()
        self._last_suffix = self._item_suffix
        if has_new_tower:
            # Random, so that no client can give an item the id of another one's.
            self._item_suffix = f"@weights {version} {secrets.token_hex(8)}"

    def name_encoded(self, identifier: str) -> str:
        """Return what an item is called whose embeddings the present towers give."""
        return identifier + self._item_suffix

    def rename(self, request: Request) -> None:
        """Give other keys to a request that was made before `change_weights`, and holds nothing."""
        request.change_keys(self._rename_item, self.block_hasher)

    def rename_adapted(self, request: Request, old_version: str) -> None:
        """Give other keys to a request that has another adapter now, and holds nothing."""
        adapter, suffix = request.lora_request, self._item_suffix
        assert adapter is not None, f"{request.request_id=} has no adapter"
        ends = f"@{old_version}{suffix}", f"@{adapter.lora_version}{suffix}"

        def rename(item: EncoderItem) -> str:
            base = item.identifier.removesuffix(ends[0])
            return item.identifier if base == item.identifier else base + ends[1]

        request.change_keys(rename, self.block_hasher)

    def _rename_item(self, item: EncoderItem) -> str:
        if item.prompt is not None:
            return self._name_states()
        if item.embeds is not None:
            return item.identifier
        return self.name_encoded(item.identifier.removesuffix(self._last_suffix))

    def _name_states(self) -> str:
        # Request ids may repeat.
        return f"encoder of request {next(self._encoder_numbers)}"

    def _make_block_hasher(self, seed: str | None = None) -> BlockHasher | None:
        cache = self._config.cache
        # A decoder's blocks depend on all that its encoder read, which no hash of them covers.
        depends_on_encoder = self.limits.max_encoder_len and not self._host_inputs.attends_to_items
        if not cache.enable_prefix_caching or depends_on_encoder:
            return None
        return BlockHasher(
            block_size=cache.block_size,
            # Random, so that no client can compute the hash of a block.
            none_hash=make_none_hash(seed or secrets.token_hex(16)),
            algorithm=cache.prefix_caching_hash_algo,
            is_of_prompts=self.limits.has_states or self.limits.sees == "reference",
        )

    def _make_encoder(
        self,
        message: EngineCoreRequest,
        features: Sequence[MultiModalFeatureSpec],
        items: Sequence[EncoderItem],
    ) -> EncoderItem:
        """Return an encoder's hidden states as one item, which depend on its prompt and items."""
        token_ids = self.limits.check_encoder_prompt(message.encoder_prompt_token_ids, features)
        return EncoderItem(
            identifier=self._name_states(),
            mm_position=PlaceholderRange(offset=0, length=len(token_ids)),
            prompt=EncoderPrompt(token_ids=np.array(token_ids, np.int32), items=items),
        )

    def _join_rows(self, items: Sequence[EncoderItem]) -> EncoderItem | None:
        """Return the rows that a prompt attends to; None where it has no items."""
        encoder = join_rows(self._name_states(), items)
        if encoder is not None and encoder.prompt is not None:
            token_ids = encoder.prompt.token_ids.tolist()
            self.limits.check_encoder_prompt(token_ids, encoder.prompt.items)
        return encoder

    def _make_item(
        self, feature: MultiModalFeatureSpec, adapter: RegisteredAdapter | None
    ) -> EncoderItem:
        item = self._to_item(feature, adapter)
        assert feature.tensors is not None, "resolved already"
        is_causal = self._host_inputs.is_causal(feature.tensors.get_data())
        return replace(item, is_causal=is_causal)

    def _to_item(
        self, feature: MultiModalFeatureSpec, adapter: RegisteredAdapter | None
    ) -> EncoderItem:
        """Split a feature into encoder units of the compiled shapes; keep precomputed embeddings.

        Raises `RequestError` for tensors of other shapes or dtypes.
        """
        tensors, key = feature.tensors, f"{feature.modality}_embeds"
        if self._config.model.mm.enable_mm_embeds and tensors is not None and key in tensors:
            return self._keep_embeds(feature, np.asarray(tensors[key].data))
        item_sizes = self.limits.item_sizes
        if not any(item_sizes.values()):
            raise RequestValueError(
                f"item {feature.identifier} asks for embeddings of a tower, which this engine was "
                "started without; allow media with `--limit-mm-per-prompt`",
                param="multi_modal_data",
            )
        item = feature.tensors
        assert item is not None, "resolved already"
        host_inputs = self._host_inputs
        try:
            arrays = host_inputs.encoder_inputs(item.get_data())
            rows = host_inputs.embed_rows(item.get_data())
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRuntimeError(
                f"item {feature.identifier} lacks what the model encodes; each needs "
                f"{', '.join(sorted(host_inputs.encoder_spec.inputs))}",
                param="multi_modal_data",
            ) from error
        specs = host_inputs.find_specs(arrays)
        num_outputs = sum(check_shapes(feature.identifier, arrays, spec) for spec in specs)
        for spec in specs:
            # A step has no more embeddings than a call of packs, whatever else encodes a part.
            if isinstance(spec, PackedEncoderSpec):
                function = "encode clips" if spec is host_inputs.clip_spec else "encode"
                num_patches = num_outputs * spec.patches_per_token
                largest = max(item_sizes[function], default=0)
                _check_patches(feature.identifier, num_patches, largest)
        num_embeds = feature.mm_position.get_num_embeds()
        if not host_inputs.attends_to_items and num_embeds != (
            num_outputs if rows is None else len(rows)
        ):
            raise RequestRuntimeError(
                f"item {feature.identifier} has {num_outputs if rows is None else len(rows)} "
                f"embeddings, and placeholders for {num_embeds}; they must agree",
                param="multi_modal_data",
            )
        identifier = feature.identifier
        if adapter is not None and self._config.lora.enable_tower_connector_lora:
            # Of this adapter, and not of one that had its name before.
            identifier = f"{identifier}@{adapter.lora_version}"
        return EncoderItem(
            identifier=self.name_encoded(identifier),
            mm_hash=feature.mm_hash,
            mm_position=feature.mm_position,
            units=arrays,
            rows=rows,
        )

    def _keep_embeds(self, feature: MultiModalFeatureSpec, embeds: np.ndarray) -> EncoderItem:
        """Return an item with embeddings, which must be finite in the dtype that they are kept in.

        Raises `RequestError` for others, and for another shape or dtype.
        """
        name = f"`{feature.modality}_embeds` of item {feature.identifier}"
        if embeds.dtype.name not in EMBEDS_DTYPES:
            raise RequestTypeError(
                f"{name} are of dtype {embeds.dtype}; give one of {', '.join(EMBEDS_DTYPES)}",
                param="multi_modal_data",
            )
        expected = (feature.mm_position.get_num_embeds(), self._embed_width)
        if embeds.shape != expected:
            raise RequestRuntimeError(
                f"{name} have shape {embeds.shape}; its placeholders and the model's width ask for "
                f"{expected}",
                param="multi_modal_data",
            )
        with np.errstate(over="ignore"):
            rows = embeds.astype(self._dtype)
        if not np.isfinite(rows).all():
            raise RequestValueError(
                f"{name} have values that are NaN, or beyond {self._dtype.name}; give finite ones",
                param="multi_modal_data",
            )
        return EncoderItem(
            identifier=feature.identifier, mm_position=feature.mm_position, embeds=rows
        )

    def _find_positions(
        self, token_ids: Sequence[int], features: Sequence[MultiModalFeatureSpec]
    ) -> RotaryPositions | None:
        items = [
            PromptItem(feature.mm_position, feature.tensors.get_data())
            for feature in sorted(features, key=lambda one: one.mm_position.offset)
            if feature.tensors is not None
        ]
        return self._host_inputs.prompt_positions(token_ids, items)


def _check_patches(identifier: str, num_patches: int, largest: int) -> None:
    if num_patches > largest:
        raise RequestRuntimeError(
            f"item {identifier} has {num_patches} patches; the encoder takes {largest}: use a "
            "smaller picture, or fewer frames, or raise `max_num_batched_tokens`",
            param="multi_modal_data",
        )
