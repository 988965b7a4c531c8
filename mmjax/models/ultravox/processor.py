"""Ultravox's prompt side: each `<|audio|>` becomes one token for 160 ms of its clip.

Before: `<|audio|>what is said`. After, of a clip of 2 s: 13 of the tokenizer's EOS, and the text.
Only these 13 take embeddings: EOS may stand elsewhere in a prompt, between turns, say.

`<|audio|>` is no token: a text is split around it, and its parts are tokenized by themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.family import FamilyInfo, FamilyProcessor, Target, item_fields, make_factories
from mmjax.models.ultravox.host_inputs import UltravoxHostInputs
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_feature_settings
from mmjax.processing.items.parse import AudioEmbedsDataParser
from mmjax.processing.media.log_mel import LogMel
from mmjax.processing.prompt_updates.matching import find_unapplied
from mmjax.processing.prompt_updates.updates import (
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    as_ids,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.validation import validate_all_applied
from mmjax.rounding import round_up

PLACEHOLDER = "<|audio|>"
CHAT_TEMPLATE = write_turns(
    start=r"'<|start_header_id|>' + message.role + '<|end_header_id|>\n\n'",
    content=write_parts(audio=PLACEHOLDER),
    end="'<|eot_id|>'",
    answer=r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
    first="{{- bos_token -}}",
)
"""Llama 3's turns, without the dates that its own template writes: a checkpoint's own comes first,
whichever decoder it has."""
_MIN_HOPS = 2
"""A shorter clip has silence behind it, up to so many: the first window must be full of samples."""


@dataclass(frozen=True, kw_only=True)
class UltravoxFeatures:
    """Makes the spectrograms of clips; called as HF's feature extractors are."""

    log_mel: LogMel
    valid_kwargs: ClassVar[Sequence[str]] = ()

    def __call__(self, clips: Sequence[np.ndarray], *, return_tensors: str) -> dict[str, Any]:
        """Return `input_features` float32[units, C, frames], int32[clips] units and frames."""
        whole = [self._hear(clip) for clip in clips]
        units = [self._cut(one) for one in whole]
        return {
            "input_features": np.concatenate(units),
            "num_units": np.array([len(one) for one in units], np.int32),
            "num_frames": np.array([one.shape[1] for one in whole], np.int32),
        }

    def _hear(self, clip: np.ndarray) -> np.ndarray:
        """Return float32[C, frames] of all of a clip, up to the end of its last hop."""
        hop = self.log_mel.hop_length
        length = max(round_up(len(clip), hop), _MIN_HOPS * hop)
        return self.log_mel(np.pad(clip, (0, length - len(clip))))

    def _cut(self, whole: np.ndarray) -> np.ndarray:
        """Return chunks, zeros behind the last; they are not silence, which is below zero."""
        size, num_frames = self.log_mel.num_frames, whole.shape[1]
        padded = np.pad(whole, ((0, 0), (0, round_up(num_frames, size) - num_frames)))
        return padded.reshape(len(whole), -1, size).swapaxes(0, 1)


class UltravoxProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = AudioEmbedsDataParser
    cuts_clips = True
    host_inputs = UltravoxHostInputs
    limits: ClassVar = {"audio": None}
    placeholders: ClassVar = {"audio": PLACEHOLDER}
    adds_special_tokens = False

    def load_feature_settings(self) -> Mapping[str, Any]:
        """Return the checkpoint's own settings, or those of the Whisper that config.json names."""
        config = self.ctx.model_config
        directories = [config.path, *filter(None, [config.parts.get("audio_tower.")])]
        found = next(filter(None, map(load_feature_settings, directories)), {})
        # What HF takes without the file, but for a number that the encoder knows.
        return {"feature_size": self.get_hf_config().audio_config.num_mel_bins, **found}

    def load_hf_processor(self) -> ProcessorOfParts:
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(), feature_extractor=UltravoxFeatures(log_mel=self.log_mel)
        )

    def get_embed_token_id(self, modality: str) -> int:
        """Return EOS, which is written in the place of a clip."""
        token_id = self.get_tokenizer().eos_token_id
        if token_id is None:
            raise CheckpointError(
                "the tokenizer has no `eos_token`, which stands in the place of clips; name one in "
                "tokenizer_config.json"
            )
        return token_id

    def get_target(self, modality: str) -> Target:
        return as_ids(PLACEHOLDER, self.get_tokenizer())

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        counts = outputs.get("num_units", ())
        on_host = ["num_units", "num_frames"]
        return item_fields("audio", units=["input_features"], counts=counts, on_host=on_host)

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return sum(self.own_inputs.count_chunk_rows(int(tensors["num_frames"])))


class UltravoxProcessor(FamilyProcessor[UltravoxProcessingInfo]):
    def _tokenize_text(
        self,
        prompt: str,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> list[int]:
        """Tokenize what stands before, between and behind placeholders by itself."""
        first, *others = prompt.split(PLACEHOLDER)
        arguments = (hf_processor_mm_kwargs, tokenization_kwargs)
        return self._join(super()._tokenize_text(first, *arguments), others)

    def _join(self, token_ids: list[int], texts: Sequence[str]) -> list[int]:
        """Return the tokens, and those of the texts, a placeholder's before each."""
        tokenizer, joined = self.info.get_tokenizer(), list(token_ids)
        for text in texts:
            joined += [*as_ids(PLACEHOLDER, tokenizer), *as_ids(text, tokenizer)]
        return joined

    def _split(self, text: str) -> list[int]:
        """Return the tokens of a text that has its special tokens already."""
        first, *others = text.split(PLACEHOLDER)
        return self._join(as_ids(first, self.info.get_tokenizer()), others)

    def _apply_prompt_updates(
        self, token_ids: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        """Write clips by a token that no prompt has, so that they are found again, then EOS.

        Tokens of a whole text, whose placeholders may have joined the words around them, are
        tokenized again in parts.
        """
        if not any(mm_prompt_updates.values()):
            return token_ids, {}
        tokenizer, mark = self.info.get_tokenizer(), self.info.vocab_size
        marked = {
            modality: [[one.with_content([mark] * len(one.content.full)) for one in x] for x in all]
            for modality, all in mm_prompt_updates.items()
        }
        text = tokenizer.decode(token_ids)
        is_whole = as_ids(text, tokenizer) == token_ids
        given = self._split(text) if is_whole else token_ids
        updated, result = self._apply_token_matches(given, marked)
        if find_unapplied(result) is not None:
            # Words of the tokens may have other tokens then, as where any family's text is told.
            updated, result = self._apply_token_matches(self._split(text), marked)
            validate_all_applied(self.info, result)
        found = self._find_mm_placeholders(updated, marked)
        eos = self.info.get_embed_token_id("audio")
        written = {
            modality: [replace(one, tokens=[eos] * one.length) for one in places]
            for modality, places in found.items()
        }
        return [eos if one == mark else one for one in updated], written


FACTORIES = make_factories(UltravoxProcessingInfo, UltravoxProcessor)
