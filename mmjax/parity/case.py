"""Run one prompt with mmjax and HF, from text, images, videos and clips to tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmjax.config.engine_config import ModelConfig
from mmjax.errors import ConfigError
from mmjax.models.host_inputs import AFFINE, PackedEncoderSpec
from mmjax.models.registry import create_processor, load_model_class
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.parity.compare import CaseReport, compare
from mmjax.parity.departures import find_settings, obeying
from mmjax.parity.reference import (
    calls_by_modality,
    generate_reference,
    load_reference,
    load_reference_adapter,
    load_reference_processor,
    make_pixels,
    make_reference_inputs,
    run_reference,
    with_float_pixels,
)
from mmjax.training.samples import make_sample

DEFAULT_MAX_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt with its images, videos and clips."""

    name: str
    prompt: str | list[int]
    images: Sequence[Image.Image] = ()
    videos: Sequence[tuple[np.ndarray, Mapping[str, Any]]] = ()
    """Frames uint8[frames, height, width, 3], and their metadata."""
    clips: Sequence[np.ndarray] = ()
    """float32[T], at the model's rate."""
    mm_processor_kwargs: Mapping[str, Any] | None = None


class Parity:
    """A checkpoint loaded by mmjax and by HF (torch)."""

    def __init__(
        self, model_config: ModelConfig, *, max_len: int, adapter: Path | None = None
    ) -> None:
        """`adapter`: a directory that PEFT wrote, with which both compute."""
        architecture = model_config.architecture
        self.max_len = max_len
        self.model_config = model_config
        model_class: Any = load_model_class(architecture)
        self.config = model_config.hf_config
        self.rules = model_class.rules(self.config)
        self.processor = create_processor(model_config)
        # Whisper's: the prompt is the decoder's, and each needs a clip.
        self._hears_in_encoder = (
            self.takes_clips(1) and self.processor.info.max_encoder_len is not None
        )
        self.hf_processor = load_reference_processor(
            model_config.path, self.config.model_type, self.processor.info.get_hf_processor()
        )
        self._chat_template = model_config.chat_template or getattr(
            self.hf_processor, "chat_template", None
        )
        # Ours first: it explains a directory that lacks files or tensors.
        self.ours = PagedModel.from_directory(
            model_config.path, model_class, model_config.hf_config, max_len=max_len
        )
        if adapter is not None:
            self.ours.load_adapter(adapter)
        self.reference = load_reference(model_config.path, architecture)
        if adapter is not None:
            self.reference = load_reference_adapter(self.reference, adapter)

    def explain(self, case: Case, report: CaseReport, tolerance: float) -> dict[str, Any]:
        """Return the settings by which alone the models differ, those of config.json; or none.

        They are the fewest with which HF's model gives what ours does.
        """
        if report.is_within(tolerance):
            return {}
        for settings in find_settings(self.config):
            with obeying(self.reference, settings):
                if self.run(case, max_tokens=len(report.token_ids)).is_within(tolerance):
                    return settings
        return {}

    def takes_images(self, num_images: int) -> bool:
        """Return whether both models take a prompt with so many; HF's BLIP-2 needs one."""
        if self._hears_in_encoder:
            return False
        limit = self.processor.info.get_supported_mm_limits().get("image", 0)
        pixels = signature(self.reference.forward).parameters.get("pixel_values")
        least = int(pixels is not None and pixels.default is pixels.empty)
        return least <= num_images and (limit is None or num_images <= limit)

    @property
    def takes_videos(self) -> bool:
        """Whether a prompt may have a video."""
        return self.processor.info.get_supported_mm_limits().get("video", 0) != 0

    def takes_clips(self, num_clips: int) -> bool:
        """Return whether a prompt may have so many clips."""
        limit = self.processor.info.get_supported_mm_limits().get("audio", 0)
        return limit is None or num_clips <= limit

    def write_prompt(
        self, text: str, num_images: int, num_videos: int = 0, num_clips: int = 0
    ) -> str:
        """Return a user's turn, media before the text, by the chat template if there is one."""
        tokenizer, find = (
            self.processor.info.get_tokenizer(),
            self.processor.info.find_placeholder_str,
        )
        if self._hears_in_encoder:
            return tokenizer.convert_ids_to_tokens(self.config.decoder_start_token_id) + text
        numbers = {"image": num_images, "video": num_videos, "audio": num_clips}
        images, videos, clips = (
            (find(modality, 1) or "") * number for modality, number in numbers.items()
        )
        template = self._chat_template or tokenizer.chat_template
        if template is None:
            return images + videos + clips + text
        media = [{"type": modality} for modality, number in numbers.items() for _ in range(number)]
        prompt = _render(tokenizer, template, media, text)
        if videos not in prompt:
            # Templates of checkpoints before videos leave such parts out.
            prompt = _render(tokenizer, template, media, videos + text)
        # The tokenizer adds BOS itself.
        return prompt.removeprefix(tokenizer.bos_token or "")

    def process(self, case: Case) -> Sample:
        """Return the outputs of mmjax's processor."""
        return make_sample(self._apply(case))

    def _apply(self, case: Case) -> Any:
        media = {
            "image": list(case.images),
            "video": list(case.videos),
            "audio": list(case.clips),
        }
        return self.processor.apply(
            case.prompt,
            {modality: items for modality, items in media.items() if items},
            hf_processor_mm_kwargs=dict(case.mm_processor_kwargs or {}),
        )

    def process_reference(self, case: Case) -> Any:
        """Return the outputs of HF's processor, which takes only text prompts.

        Where there is none without torchvision, and for videos and clips there is none, HF's model
        is given what mmjax's made.
        """
        if case.videos or case.clips or self.hf_processor is None:
            return self._as_reference(self._apply(case))
        text = case.prompt
        if not isinstance(text, str):
            text = self.processor.info.get_tokenizer().decode(text)
        try:
            return with_float_pixels(self.hf_processor)(
                text=[text],
                images=[list(case.images)] if case.images else None,
                return_tensors="pt",
                **(case.mm_processor_kwargs or {}),
            )
        except ValueError:
            if case.images:
                raise
            # PaliGemma's refuses a text alone, which its model takes.
            return self._as_reference(self._apply(case))

    def _as_reference(self, inputs: Any) -> dict[str, Any]:
        """Return what our processor gave, of it what HF's model takes."""
        spec = self.ours.host_inputs.encoder_spec
        shape, _ = spec.inputs.get(AFFINE, ((3, 3, 1), ""))
        data = make_pixels(inputs.mm_kwargs.get_data(), colours_last=shape[-1] > 1)
        token_ids = inputs.prompt_token_ids
        data = self.processor.info.reference_inputs(token_ids, data)
        known = signature(self.reference.forward).parameters.keys()
        # Of towers for images of one size HF's LLaVA takes none, though its signature has them.
        has_sizes = "image_sizes" in known and isinstance(spec, PackedEncoderSpec)
        tensors = make_reference_inputs(token_ids, data, has_sizes=has_sizes)
        if "mm_token_type_ids" in known - tensors.keys():
            kinds = tensors["input_ids"] * 0
            for number, modality in enumerate(("image", "video"), 1):
                for place in inputs.mm_placeholders.get(modality, ()):
                    for first, last in place.extract_embeds_range():
                        kinds[0, first : last + 1] = number
            tensors["mm_token_type_ids"] = kinds
        if self._hears_in_encoder:
            return {
                "decoder_input_ids": tensors["input_ids"],
                "input_features": tensors["input_features"],
            }
        return {name: value for name, value in tensors.items() if name in known}

    def check(self, case: Case, max_tokens: int) -> Sample:
        """Process a case; ConfigError for a prompt that leaves no room for its greedy tokens."""
        sample = self.process(case)
        if sample.num_tokens + max_tokens > self.max_len:
            raise ConfigError(
                f"the prompt of {case.name} has {sample.num_tokens} tokens, and `--max-len` is "
                f"{self.max_len}; give {sample.num_tokens + max_tokens} or more, for "
                f"{max_tokens} greedy tokens behind it"
            )
        return sample

    def run(self, case: Case, *, max_tokens: int = DEFAULT_MAX_TOKENS) -> CaseReport:
        """Run both models on the outputs of their own processors; raises as `check`."""
        sample = self.check(case, max_tokens)
        inputs = self.process_reference(case)
        encoder_ids = None if self._hears_in_encoder else sample.encoder_token_ids
        token_ids = sample.token_ids if encoder_ids is None else encoder_ids
        asked = inputs["decoder_input_ids" if self._hears_in_encoder else "input_ids"]
        is_equal = np.array_equal(token_ids, asked[0].numpy())
        if encoder_ids is not None:
            # T5 of HF makes none itself.
            decoder = make_reference_inputs(sample.token_ids, {})
            inputs = {**inputs, "decoder_input_ids": decoder["input_ids"]}
        differences = compare(
            self.ours.run(sample, by_modality=calls_by_modality(inputs)),
            run_reference(self.reference, inputs, self.rules),
        )
        return CaseReport(
            name=case.name,
            num_prompt_tokens=sample.num_tokens,
            num_images=len(case.images),
            num_videos=len(case.videos),
            num_clips=len(case.clips),
            differences=differences,
            token_ids=self.ours.generate(sample, max_tokens),
            reference_token_ids=generate_reference(self.reference, inputs, max_tokens),
            is_prompt_equal=is_equal,
        )


def _render(tokenizer: Any, template: str, media: list[dict[str, Any]], text: str) -> str:
    content = [*media, {"type": "text", "text": text}]
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
