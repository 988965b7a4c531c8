"""LFM2-VL's prompt side: tiles of a picture by row and column, and the whole of it last.

Before: `look <image>`. After, of a picture of one row and two columns: `look <|image_start|>
<|img_row_1_col_1|> <image>*N <|img_row_1_col_2|> <image>*N <|img_thumbnail|> <image>*M
<|image_end|>`; of one that is not cut, `<|image_start|> <image>*M <|image_end|>`. Only the N and
the M take embeddings.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import check_settings
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.lfm2_vl.host_inputs import Lfm2VLHostInputs
from mmjax.models.lfm2_vl.image_processor import Budget, Lfm2VLImageProcessor, find_largest
from mmjax.processing.chat_turns import write_chatml, write_parts
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser
from mmjax.processing.prompt_updates.updates import as_ids
from mmjax.processing.tensors.fields import MultiModalFieldConfig

IMAGE, START, END = "<image>", "<|image_start|>", "<|image_end|>"
THUMBNAIL = "<|img_thumbnail|>"
CHAT_TEMPLATE = write_chatml(write_parts(image=IMAGE), "{{- bos_token -}}")
"""LFM2's turns, without tools."""


class Lfm2VLProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser
    """Nothing says how many of the embeddings are a tile."""
    host_inputs = Lfm2VLHostInputs
    placeholders: ClassVar = {"image": IMAGE}
    adds_special_tokens = False

    def load_hf_processor(self) -> ProcessorOfParts:
        """Put together what AutoProcessor would, which wants torchvision."""
        config = self.get_hf_config()
        self.check_token(IMAGE)
        check_settings(
            self.processor_settings, {"use_image_special_tokens": True}, source="mmjax writes"
        )
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=Lfm2VLImageProcessor(
                load_image_settings(self.ctx.model_config.path),
                patch_size=config.vision_config.patch_size,
                factor=config.downsample_factor,
            ),
        )

    def get_unit_size(self) -> None:
        """Return nothing: tiles and whole pictures have sizes of their own."""

    def get_budget(self, mm_kwargs: Mapping[str, object]) -> Budget:
        """Return what decides how pictures are cut, under kwargs over the operator's."""
        return self.get_image_processor().budget(self.scope_kwargs(mm_kwargs))

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Give HF's model tiles and whole pictures one by one, which are padded to each other."""
        if "spatial_shapes" not in tensors:
            return tensors
        counts = np.asarray(tensors["spatial_shapes"]).prod(-1)
        patches = tensors["pixel_values"].reshape(counts.sum(), -1)
        return {
            "pixel_values": np.split(patches, np.cumsum(counts)[:-1]),
            "pixel_attention_mask": [np.ones(count, np.int32) for count in counts],
            "spatial_shapes": tensors["spatial_shapes"],
        }

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the settings of the checkpoint or the operator by which pictures are larger."""
        processor: Lfm2VLImageProcessor = self.get_image_processor()
        levels = [
            processor.budget({**kwargs, "do_image_splitting": True, "use_thumbnail": True})
            for kwargs in ({}, self.scope_kwargs({}))
        ]
        largest = max(levels, key=lambda budget: find_largest(budget)[1])
        return {name: getattr(largest, name) for name in sorted(processor.valid_kwargs)}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        return find_largest(self.get_budget(self.get_planned_mm_kwargs()))

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        counts = {name: outputs.get(f"image_num_{name}", ()) for name in ("patches", "units")}
        units = np.asarray(counts["units"], int)
        return {
            **item_fields(
                "image",
                units=["pixel_values"],
                counts=counts["patches"],
                on_host=["image_tiles", *(f"image_num_{name}" for name in counts)],
            ),
            "spatial_shapes": MultiModalFieldConfig.flat_from_sizes(
                "image", units, keep_on_cpu=True
            ),
        }

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the rows and columns of tiles, and the embeddings of each and of the whole."""
        squares = np.asarray(tensors["spatial_shapes"]) // self.get_hf_config().downsample_factor
        return (*tensors["image_tiles"].tolist(), *squares.prod(-1).tolist())

    def write_item(self, modality: str, size: tuple[int, ...]) -> list[int]:
        """Write a picture of (rows, columns, embeddings...) of its tiles and of the whole."""
        rows, columns, *counts = size
        tiles = [(row, column) for row in range(rows) for column in range(columns)]
        names = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row, column in tiles]
        names = [*names, THUMBNAIL][: len(counts)] if len(tiles) > 1 else [""]
        pieces = (name + IMAGE * count for name, count in zip(names, counts, strict=True))
        return as_ids(START + "".join(pieces) + END, self.get_tokenizer())


FACTORIES = make_factories(Lfm2VLProcessingInfo)
