"""Train the adapter in the box: tiny_scenes answers the same questions in Italian.

    python checkpoints/tiny_scenes/train_lora.py --pictures 6 --steps 800
    python checkpoints/tiny_scenes/train_lora.py --seed 1 --steps 1500 --start FOLDER

The second command goes on from an adapter, with other scenes. Only matrices of the decoder get an
adapter, by mmjax's own layers for them; the model stays as it is. The adapter is written as PEFT
writes one, to `adapters/italian/`.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from batches import BatchPlan, Phase, prefetch
from build_checkpoint import MODEL_FOLDER
from italian import reword
from learner import Arrays, answer_loss, forward, to_device_arrays
from packing import RowSize
from products import with_bfloat16_products
from safetensors.numpy import load_file, save_file
from tqdm import tqdm
from transformers import AutoConfig

from mmjax.engine.device.functions import AdaptedModel
from mmjax.layers.module import build_abstract
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.models.interface import AdapterSizes, build_model
from mmjax.weights.load import load_params

ADAPTER_FOLDER = Path(__file__).parent / "adapters" / "italian"
RANK = 8
PEAK_RATE, WARM_UP_STEPS, DECAY_SHARE = 6e-3, 50, 0.7
ROW_SIZE = RowSize(tokens=208, targets=144)
"""Words that are no tokens are spelled: five things in Italian have 120."""
FIRST_STEP = 5000
"""Of the batches' schedule of sizes: the model knows the smallest things already."""
EMPHASIS = {"color": 2.0, "shape": 2.0, "left": 1.5}
"""A description has many more tokens than these."""
TARGET_MODULES = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
PUBLISHED = "base_model.model.model."
"""What PEFT's names have before those of mmjax's tree, which are HF's."""


class AdapterState(NamedTuple):
    """What a step changes."""

    adapter: Mapping[str, jax.Array]
    """The trained arrays, by their names in the model's tree."""
    optimizer: Any


class AdapterLearner:
    """tiny_scenes with one slot for an adapter, and the optimiser of what is in it."""

    def __init__(self, model: Path, *, num_steps: int, seed: int, products: str) -> None:
        sizes = AdapterSizes(1, RANK, jnp.float32, has_towers=False)
        config = AutoConfig.from_pretrained(model)
        build = (build_model, Gemma3ForConditionalGeneration, config)
        graphdef, abstract = build_abstract(*build, adapters=sizes, dtype=jnp.float32)
        _, plain = build_abstract(*build, dtype=jnp.float32)
        self.model = AdaptedModel.of(graphdef, abstract, has_towers=False)
        rules = Gemma3ForConditionalGeneration.rules(config)
        self.params = load_params(model, plain, rules, use_tqdm=False)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adam(_schedule(num_steps), b2=0.98)
        )
        self.initial = _initialize(self.model.shapes, seed)
        gradients = jax.value_and_grad(self._loss)
        self.gradients = with_bfloat16_products(gradients) if products == "bfloat16" else gradients
        self.update = jax.jit(self._update, donate_argnums=0)

    def _update(
        self, state: AdapterState, params: Any, arrays: Arrays
    ) -> tuple[AdapterState, jax.Array]:
        loss, gradients = self.gradients(state.adapter, params, arrays)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer)
        adapter: Any = optax.apply_updates(state.adapter, updates)
        return AdapterState(adapter, optimizer), loss

    def _loss(self, adapter: Mapping[str, jax.Array], params: Any, arrays: Arrays) -> jax.Array:
        untrained = {
            name: jnp.zeros(leaf.shape, leaf.dtype)
            for name, leaf in self.model.shapes.items()
            if name not in adapter
        }
        slots = jnp.zeros((1,), jnp.int32)  # of every row
        model = self.model.bind(params, {**adapter, **untrained}, slots)
        logits, _, _ = forward(model, arrays)
        return answer_loss(logits, arrays)


def _schedule(num_steps: int) -> optax.Schedule:
    decay = round(num_steps * DECAY_SHARE)
    parts = [
        optax.linear_schedule(0.0, PEAK_RATE, WARM_UP_STEPS),
        optax.constant_schedule(PEAK_RATE),
        optax.linear_schedule(PEAK_RATE, 0.0, decay),
    ]
    return optax.join_schedules(parts, [WARM_UP_STEPS, num_steps - decay])


def _initialize(shapes: Mapping[str, Any], seed: int) -> dict[str, jax.Array]:
    """Return what is trained: a random `a` and a zero `b` of each layer, as PEFT begins."""
    rng = np.random.default_rng([seed, 3])
    adapter = {}
    for name, leaf in sorted(shapes.items()):
        if ".layers." not in name or name.endswith(".bias"):
            continue
        bound = 1 / np.sqrt(leaf.shape[-1])
        is_a = name.endswith(".a")
        value = rng.uniform(-bound, bound, leaf.shape) if is_a else np.zeros(leaf.shape)
        adapter[name] = jnp.asarray(value, jnp.float32)
    return adapter


def load(folder: Path) -> dict[str, jax.Array]:
    """Read what `export` wrote."""
    adapter = {}
    for name, array in load_file(folder / "adapter_model.safetensors").items():
        layer, _, factor = name.removeprefix(PUBLISHED).removesuffix(".weight").rpartition(".lora_")
        axis = 0 if factor == "A" else 1
        adapter[f"{layer}.lora.{factor.lower()}"] = jnp.asarray(np.expand_dims(array, axis))
    return adapter


def export(folder: Path, adapter: Mapping[str, jax.Array]) -> None:
    """Write the adapter as PEFT does: its two files."""
    tensors = {}
    for name, leaf in adapter.items():
        layer, _, factor = name.rpartition(".lora.")
        array = np.asarray(leaf[0] if factor == "a" else leaf[:, 0], np.float32)
        tensors[f"{PUBLISHED}{layer}.lora_{factor.upper()}.weight"] = np.ascontiguousarray(array)
    config = {
        "base_model_name_or_path": "tiny_scenes",
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": TARGET_MODULES,
        "task_type": "CAUSAL_LM",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes for the owner alone


def train(
    learner: AdapterLearner,
    adapter: Mapping[str, jax.Array],
    *,
    num_steps: int,
    num_pictures: int,
    seed: int,
) -> Mapping[str, jax.Array]:
    """Return the arrays after all steps."""
    state = AdapterState(adapter, learner.optimizer.init(adapter))
    plan = BatchPlan(
        pictures=num_pictures,
        single_rows=num_pictures,
        pair_rows=3 * num_pictures // 8,
        chat_rows=1,
        row_size=ROW_SIZE,
        reword=reword,
    )
    phases = (Phase(start=0, plan=plan, emphasis=EMPHASIS),)
    batches = prefetch(seed + 1, FIRST_STEP, FIRST_STEP + num_steps, phases)
    loss = jnp.zeros(())
    with tqdm(batches, total=num_steps, unit="step") as progress:
        for batch in progress:
            state, loss = learner.update(state, learner.params, to_device_arrays(batch))
            progress.set_postfix(loss=f"{float(loss):.4f}")
    if not np.isfinite(float(loss)):
        raise FloatingPointError(f"the loss is {float(loss)} after {num_steps} steps")
    return state.adapter


def main() -> None:
    parser = argparse.ArgumentParser(description="Train tiny_scenes' Italian adapter.")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--pictures", type=int, default=8, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--products", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--start", type=Path, default=None, help="folder of an adapter to go on from"
    )
    parser.add_argument("--out", type=Path, default=ADAPTER_FOLDER)
    args = parser.parse_args()
    learner = AdapterLearner(
        MODEL_FOLDER, num_steps=args.steps, seed=args.seed, products=args.products
    )
    adapter = learner.initial if args.start is None else load(args.start)
    trained = train(
        learner, adapter, num_steps=args.steps, num_pictures=args.pictures, seed=args.seed
    )
    export(args.out, trained)


if __name__ == "__main__":
    main()
