"""Settings of config.json that mmjax obeys and HF's model of a family may ignore.

Whether one explains a difference is computed: with HF's model made to obey it, both agree.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain, combinations
from typing import Any

from mmjax.parity.reference import import_torch


@contextmanager
def obeying(model: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Let HF's model obey `settings`, keys of `DEPARTURES`, within the context."""
    with ExitStack() as stack:
        for key, value in settings.items():
            stack.enter_context(DEPARTURES[key](model, value))
        yield


def find_settings(config: Any) -> list[dict[str, Any]]:
    """Return the sets of those that a model's configuration has, the smallest first."""
    text = config.get_text_config()
    found = {key: getattr(text, key, None) for key in DEPARTURES}
    if text.model_type == "hunyuan_vl_text":
        found[AXES] = text.rope_parameters[AXES]
    if config.model_type.startswith("qwen3_omni"):
        found[PACE] = config.position_id_per_seconds
    items = [(key, value) for key, value in found.items() if value is not None]
    sizes = range(1, len(items) + 1)
    return [dict(some) for some in chain.from_iterable(combinations(items, n) for n in sizes)]


def describe(explained: Sequence[tuple[str, Mapping[str, Any]]], model: Any) -> list[str]:
    """Return a note for each set of settings that explains the differences of named cases."""
    cases: dict[str, list[str]] = {}
    for name, settings in explained:
        values = " and ".join(f"`{key}` to {value}" for key, value in settings.items())
        cases.setdefault(values, []).append(name)
    return [
        f"config.json sets {values}: mmjax obeys, HF's `{type(model).__name__}` does not. This "
        f"alone explains {', '.join(names)}: within tolerance once HF's model obeys as well"
        for values, names in cases.items()
        if values
    ]


@contextmanager
def _capping_logits(model: Any, cap: float) -> Iterator[None]:
    def replace(module: Any, arguments: Any, output: Any) -> None:
        output.logits = import_torch().tanh(output.logits / cap) * cap

    handle = model.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _scaling_logits(model: Any, scale: float) -> Iterator[None]:
    def replace(module: Any, arguments: Any, output: Any) -> None:
        output.logits = output.logits * scale

    handle = model.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _capping_scores(model: Any, cap: float) -> Iterator[None]:
    """Pass the cap on to attention, of which only the eager implementation takes one."""

    def extend(module: Any, arguments: Any, kwargs: Any) -> Any:
        return arguments, {**kwargs, "softcap": cap}

    handles = [
        module.register_forward_pre_hook(extend, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "attn_logit_softcapping")
    ]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()


@contextmanager
def _pairing_axes(model: Any, sections: Sequence[int]) -> Iterator[None]:
    rotary = model.model.language_model.rotary_emb
    pair_axes(model)
    try:
        yield
    finally:
        del rotary.recomposition_frequencies


def pair_axes(model: Any) -> None:
    """Let HF's HunYuan-VL turn both numbers of a pair by one axis of positions.

    As its published code does, and vLLM's: sections are of the frequencies. HF's class doubles
    each, and cuts the whole head by them, so that the halves of a head turn by different axes.
    """
    torch = import_torch()
    rotary = model.model.language_model.rotary_emb

    def choose(waves: Any) -> Any:
        parts = waves.split(rotary.mrope_section, dim=-1)
        half = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        return torch.cat([half, half], dim=-1)

    rotary.recomposition_frequencies = choose


@contextmanager
def _masking_pictures(model: Any, layers: Sequence[int]) -> Iterator[None]:
    handles = mask_pictures(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def mask_pictures(model: Any) -> list[Any]:
    """Let HF's Llama 3.2 Vision show no picture to tokens before the first; return its hooks.

    As Meta's code, and vLLM's. HF's class gives such tokens a mean over all pictures, of which it
    masks only what the MLP behind makes (huggingface/transformers#39379).
    """

    def keep(module: Any, arguments: Any, kwargs: Any) -> None:
        module.cross_attn.is_shown = kwargs["full_text_row_masked_out_mask"]

    def mask(module: Any, arguments: Any, output: Any) -> Any:
        out, weights = output
        return (out if module.is_shown is None else out * module.is_shown[:, 0]), weights

    handles = []
    for module in model.modules():
        if hasattr(module, "cross_attn"):
            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
            handles.append(module.cross_attn.register_forward_hook(mask))
    return handles


@contextmanager
def _rounding_times(model: Any, pace: int) -> Iterator[None]:
    rounded = round_times(model)
    try:
        yield
    finally:
        for module in rounded:
            del module.get_llm_pos_ids_for_vision


def round_times(model: Any) -> list[Any]:
    """Let HF's Qwen3-Omni turn frames of videos by whole numbers; return the modules it changes.

    Rounded down, as vLLM's, and as HF's Qwen2.5-Omni; HF's class leaves fractions.
    """
    # Answers ask the model for positions, and passes over prompts the model within it.
    modules = [one for one in model.modules() if hasattr(one, "get_llm_pos_ids_for_vision")]
    for module in modules:
        module.get_llm_pos_ids_for_vision = _round(module.get_llm_pos_ids_for_vision)
    return modules


def _round(place: Callable[..., Any]) -> Callable[..., Any]:
    def place_rounded(start: Any, number: Any, merge: Any, times: Any, *grids: Any) -> Any:
        return place(start, number, merge, [int(time) for time in times], *grids)

    return place_rounded


AXES, PACE = "mrope_section", "position_id_per_seconds"
DEPARTURES: Mapping[str, Callable[[Any, Any], AbstractContextManager[None]]] = {
    "final_logit_softcapping": _capping_logits,
    "attn_logit_softcapping": _capping_scores,
    "logit_scale": _scaling_logits,
    AXES: _pairing_axes,
    PACE: _rounding_times,
    "cross_attention_layers": _masking_pictures,
    "logits_scaling": lambda model, divisor: _scaling_logits(model, 1 / divisor),
}
"""By their keys in the configuration of the text model, or, of `PACE`, of the whole."""
