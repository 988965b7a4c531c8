"""A processed prompt's items as the engine gets them."""

from mmjax.errors import RequestValueError
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.tensors.inputs import (
    ItemData,
    MultiModalFeatureSpec,
    MultiModalInputs,
    MultiModalKwargsItems,
)


def mm_identifier(
    mm_hash: str, *, lora_name: str | None = None, enable_tower_connector_lora: bool = False
) -> str:
    """Return the name of an item's encoder output: its hash, unless an adapter changes the tower.

    `("ab", lora_name="poet", enable_tower_connector_lora=True)` -> `"poet:ab"`.
    """
    if lora_name is None or not enable_tower_connector_lora:
        return mm_hash
    return f"{lora_name}:{mm_hash}"


def build_features(
    inputs: MultiModalInputs,
    *,
    lora_name: str | None = None,
    enable_tower_connector_lora: bool = False,
) -> list[MultiModalFeatureSpec]:
    """Return the items, sorted by their place in the prompt; tensors that repeat come once."""
    _check_hashes(inputs)
    features = inputs.to_features()
    sent: dict[str, ItemData] = {}
    for feature in features:
        mm_hash = feature.mm_hash or feature.identifier
        feature.identifier = mm_identifier(
            mm_hash, lora_name=lora_name, enable_tower_connector_lora=enable_tower_connector_lora
        )
        # By identity: an address in shared memory is made anew for every reading.
        if feature.data is not None and feature.data is sent.get(mm_hash):
            feature.data = None
        elif feature.data is not None:
            sent[mm_hash] = feature.data
    return features


def all_hashes(prepared: PreparedInputs) -> list[str]:
    """Return the hashes of a prompt's items, each once."""
    return list(dict.fromkeys(h for hashes in prepared.mm_hashes.values() for h in hashes))


def inputs_with_tensors(prepared: PreparedInputs) -> MultiModalInputs:
    """Return a prompt whose items all have their tensors; all of them must be fresh."""
    return MultiModalInputs(
        prompt_token_ids=prepared.prompt_token_ids,
        encoder_prompt_token_ids=prepared.encoder_prompt_token_ids,
        mm_kwargs=MultiModalKwargsItems(
            {
                modality: [prepared.fresh[mm_hash][0] for mm_hash in mm_hashes]
                for modality, mm_hashes in prepared.mm_hashes.items()
            }
        ),
        mm_hashes=prepared.mm_hashes,
        mm_placeholders=prepared.mm_placeholders,
        prompt=prepared.prompt,
    )


def _check_hashes(inputs: MultiModalInputs) -> None:
    for modality, mm_hashes in inputs.mm_hashes.items():
        for index, mm_hash in enumerate(mm_hashes):
            if not isinstance(mm_hash, str):
                raise RequestValueError(
                    f"the hash of {modality} {index} is a {type(mm_hash).__name__}; "
                    "a hash or a uuid is a str",
                    param="multi_modal_uuids",
                )
