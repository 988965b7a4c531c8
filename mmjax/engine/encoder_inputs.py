"""The encoder input of an encoder-decoder model's request, as one item of the encoder."""

from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np

from mmjax.engine.scheduling.admission import AdmissionLimits
from mmjax.engine.scheduling.request import EncoderInput, EncoderItem
from mmjax.errors import RequestRuntimeError, RequestValueError
from mmjax.models.host_inputs import HostInputs, require_units
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, PlaceholderRange


class EncoderInputs:
    """Makes and checks encoder units of encoder prompts and their items."""

    def __init__(self, host_inputs: HostInputs, limits: AdmissionLimits) -> None:
        self._host_inputs = host_inputs
        self._spec = require_units(host_inputs.encoder_spec)
        self._limits = limits
        self._numbers = count()

    def make(
        self, token_ids: Sequence[int] | None, features: Sequence[MultiModalFeatureSpec]
    ) -> EncoderInput:
        """Return the encoder input of one request; `RequestError` if it cannot be computed."""
        if token_ids is None:
            raise RequestValueError(
                "the request has no encoder's prompt, but the model is an encoder-decoder; add one",
                param="encoder_prompt",
            )
        self._limits.check_encoder_prompt(token_ids, features)
        units, num_states = self._to_units(token_ids, features)
        num_units = self._count_units(units)
        num_rows = num_units * self._spec.tokens_per_unit
        if not 0 < num_states <= min(num_rows, self._limits.max_encoder_len):
            raise RequestRuntimeError(
                f"the encoder's input gives {num_states} states of {num_rows}; the model takes 1 "
                f"to {self._limits.max_encoder_len}",
                param="multi_modal_data",
            )
        item = EncoderItem(
            # Hidden states depend on image and text together; request ids may repeat.
            identifier=f"encoder of request {next(self._numbers)}",
            mm_position=PlaceholderRange(offset=0, length=num_rows),
            units=units,
        )
        self._limits.check_num_embeds(item)
        return EncoderInput(item=item, num_states=num_states)

    def _to_units(
        self, token_ids: Sequence[int], features: Sequence[MultiModalFeatureSpec]
    ) -> tuple[Mapping[str, np.ndarray], int]:
        items = [feature.tensors for feature in features]
        tensors = [item.get_data() for item in items if item is not None]
        assert len(tensors) == len(features), "resolved already"
        inputs = self._spec.inputs
        try:
            units, num_states = self._host_inputs.encoder_input(token_ids, tensors)
            arrays = {name: np.asarray(units[name], dtype) for name, (_, dtype) in inputs.items()}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RequestRuntimeError(
                "the encoder's input lacks what the model encodes; it needs "
                f"{', '.join(sorted(inputs))}",
                param="multi_modal_data",
            ) from error
        return arrays, num_states

    def _count_units(self, units: Mapping[str, np.ndarray]) -> int:
        counts = {len(array) for array in units.values()}
        for name, (shape, _) in self._spec.inputs.items():
            if units[name].shape[1:] != tuple(shape) or len(counts) != 1:
                raise RequestRuntimeError(
                    f"`{name}` of the encoder's input has shape {units[name].shape}; each unit "
                    f"must have shape {tuple(shape)}, and all inputs as many units",
                    param="multi_modal_data",
                )
        return counts.pop()
