"""Train tiny_scenes from nothing, with mmjax's own modules: reproducible by steps and seed.

    python checkpoints/tiny_scenes/train.py

Snapshots go to `runs/`; a run that was cut goes on from its last one with `--resume`, to the same
result. `--steps` may be lowered on resuming as long as the learning rate had not begun to fall: the
schedule before that does not depend on it. At the end the moving average of the weights is written
to `model/`.
"""

import argparse
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from batches import Batch, BatchPlan, make_batch, prefetch
from build_checkpoint import MODEL_FOLDER, write_checkpoint
from learner import Learner, LearnerState, to_device_arrays
from packing import Row
from questions import ONE_KINDS, PAIR_KINDS
from safetensors.numpy import load_file, save_file
from scenes import EVALUATION
from transformers import AutoConfig

from mmjax.layers.module import flatten_params

RUNS_FOLDER = Path(__file__).parent / "runs"
EVALUATION_SEED = 7
EVALUATION_BATCHES = 8


def save_snapshot(path: Path, state: LearnerState) -> None:
    """Write the whole state, leaves in the tree's order; replaces the file at once."""
    leaves = {f"{i:04d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(leaves, partial)
    partial.replace(path)


def load_snapshot(path: Path, like: LearnerState) -> LearnerState:
    """Read what `save_snapshot` wrote for a state of the same structure."""
    leaves = load_file(path)
    return jax.tree.unflatten(
        jax.tree.structure(like), [jax.numpy.asarray(leaves[name]) for name in sorted(leaves)]
    )


def export(folder: Path, model_params: Any) -> None:
    """Write a whole checkpoint: the weights bear the names of `save_pretrained`'s layout."""
    write_checkpoint(folder)
    names = (
        ("vision_tower.", "vision_tower.vision_model."),
        ("language_model.", "language_model.model."),
    )
    tensors = {}
    for name, leaf in flatten_params(model_params).items():
        for ours, theirs in names:
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
        tensors[name] = np.ascontiguousarray(np.asarray(leaf, np.float32))
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes for the owner alone


def evaluation_batches() -> list[tuple[Batch, list[Row]]]:
    """Fresh scenes of the evaluated distribution; the same ones at every check."""
    rng = random.Random(f"check {EVALUATION_SEED}")
    plan = BatchPlan()
    return [make_batch(rng, plan, EVALUATION, {}) for _ in range(EVALUATION_BATCHES)]


def check(learner: Learner, model_params: Any, checks: list[tuple[Batch, list[Row]]]) -> str:
    """Share of whole answers right, by kind, as one line."""
    asked, right = Counter(), Counter()
    for batch, rows in checks:
        hits = np.asarray(learner.predict(model_params, to_device_arrays(batch)))
        for r, row in enumerate(rows):
            for question, start, stop in row.questions:
                asked[question.kind] += 1
                right[question.kind] += bool(hits[r, start:stop].all())
    shares = [f"{kind} {100 * right[kind] / asked[kind]:.1f}" for kind in ONE_KINDS + PAIR_KINDS]
    for name, kinds in (("ONE", ONE_KINDS), ("PAIR", PAIR_KINDS)):
        total = sum(asked[kind] for kind in kinds)
        shares.append(f"{name} {100 * sum(right[kind] for kind in kinds) / total:.2f}")
    return "  ".join(shares)


def train(args: argparse.Namespace) -> LearnerState:
    """Run the steps, with a check and a snapshot every so often."""
    config = AutoConfig.from_pretrained(MODEL_FOLDER)
    learner = Learner(
        config,
        num_steps=args.steps,
        num_more_steps=args.more_steps,
        seed=args.seed,
        use_bfloat16_products=args.products == "bfloat16",
    )
    state = learner.initial_state
    latest = RUNS_FOLDER / "latest.safetensors"
    if args.resume:
        state = load_snapshot(latest, state)
    start, num_steps = int(state.step), args.steps + args.more_steps
    checks = evaluation_batches()
    began, spent = time.perf_counter(), []
    for step, batch in enumerate(prefetch(args.seed, start, num_steps), start):
        tick = time.perf_counter()
        state, losses = learner.update(state, to_device_arrays(batch))
        answer = float(losses["answer"])
        spent.append(time.perf_counter() - tick)
        done = step + 1
        if done % 50 == 0:
            shown = " ".join(f"{name} {float(value):.3f}" for name, value in losses.items())
            rate = len(batch.pixels) * len(spent[-50:]) / sum(spent[-50:])
            minutes = (time.perf_counter() - began) / 60
            print(f"step {done} min {minutes:.1f} img/s {rate:.0f}  {shown}", flush=True)
        if not np.isfinite(answer):
            raise FloatingPointError(f"the loss is {answer} at step {done}")
        if done % args.every == 0 or done == num_steps:
            save_snapshot(latest, state)
            if done % (5 * args.every) == 0:
                shutil.copy(latest, RUNS_FOLDER / f"step_{done}.safetensors")
            print(f"CHECK {done}  {check(learner, state.average, checks)}", flush=True)
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description="Train tiny_scenes from nothing.")
    parser.add_argument("--steps", type=int, default=4800)
    parser.add_argument("--more-steps", type=int, default=800, help="steps of the second leg")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=400, help="steps between checks and snapshots")
    parser.add_argument(
        "--products",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="operands of large matrix products; parameters are float32 in any case",
    )
    parser.add_argument("--resume", action="store_true", help="go on from runs/latest.safetensors")
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER)
    args = parser.parse_args()
    write_checkpoint(args.out)
    export(args.out, train(args).average)


if __name__ == "__main__":
    main()
