"""GRPO on pictures: the model that comes with mmjax learns to count where it reads, on two cores.

    pip install 'mmjax[examples]'
    python examples/grpo_tiny_scenes.py [--seed 0] [--steps 20] [--out grpo_tiny_scenes]

"Write the number of objects.": it writes a number that it reads in the picture, or `none`. Each
step draws scenes, samples answers by the engine, rewards those that count right, takes a gradient
through `mmjax.score`, and gives the engine the new weights (docs/rl.md). OUT is then served by
`mmjax serve OUT`, and OUT/reward.svg is the curve.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mmjax import LLM, SamplingParams, ScoredModel, save_checkpoint, score

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT), str(ROOT / "checkpoints" / "tiny_scenes")]
from scenes import EVALUATION, Scene, draw, sample_number, sample_scene  # noqa: E402

from benchmarks.lines import LinePanel, draw_lines  # noqa: E402

QUESTION = "Write the number of objects."
NUM_PROMPTS, NUM_ANSWERS = 16, 8
"""Scenes of a step, and answers to each."""
CLIP = 0.2
OPTIMIZER = optax.adam(1e-4)


def sample_scenes(count: int, chance: random.Random) -> list[Scene]:
    """Draw scenes of one to five objects; half of them show a written number, too."""
    numbers = [sample_number(chance) if chance.random() < 0.5 else None for _ in range(count)]
    return [sample_scene(chance, EVALUATION, number) for number in numbers]


def ask(scene: Scene) -> list[dict[str, Any]]:
    """Return the conversation about a scene."""
    picture = {"type": "image_pil", "image_pil": draw(scene)}
    return [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]


def reward(answer: str, scene: Scene) -> float:
    """Return 1 for an answer that is the number of objects and nothing else."""
    return float(answer == str(len(scene.things)))


def show(llm: LLM, scenes: Sequence[Scene]) -> float:
    """Print the most probable answers to a few scenes; return the mean reward of all."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.chat([ask(scene) for scene in scenes], params, use_tqdm=False)
    answers = [output.outputs[0].text for output in outputs]
    print("  objects:", *(len(scene.things) for scene in scenes[:12]))
    print("  answers:", *answers[:12], flush=True)
    return float(np.mean([reward(*pair) for pair in zip(answers, scenes, strict=True)]))


def find_loss(trained, fixed, model, data):
    """Return GRPO's loss, a mean over tokens, and how far a ratio is from 1 at most."""
    batch, sampled, advantages = data
    logprobs = score(fixed | {"language_model": trained}, model, batch)
    ratio = jnp.where(batch.answer_mask, jnp.exp(logprobs - sampled), 1.0)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    return -jnp.mean(gain, where=batch.answer_mask), jnp.abs(ratio - 1).max()


@partial(jax.jit, static_argnames="model")
def train_step(trained, state, fixed, model, data):
    """Return the decoder's new weights, the optimiser's state, and the ratio's distance from 1."""
    gradient = jax.grad(find_loss, has_aux=True)
    gradients, distance = gradient(trained, fixed, model, data)
    updates, state = OPTIMIZER.update(gradients, state, trained)
    return optax.apply_updates(trained, updates), state, distance


def make_batch(model, outputs, rewards):
    """Return what `train_step` is given: prompts with answers, log-probabilities, advantages."""
    pairs = [(output.multi_modal_inputs, one) for output in outputs for one in output.outputs]
    batch = model.make_batch([(inputs, answer.token_ids) for inputs, answer in pairs])
    sampled = np.zeros(batch.answer_ids.shape, np.float32)
    for row, (_, answer) in enumerate(pairs):
        found = zip(answer.logprobs, answer.token_ids, strict=True)
        sampled[row, : len(answer.token_ids)] = [place[token].logprob for place, token in found]
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    advantages /= rewards.std(axis=1, keepdims=True) + 1e-4
    return batch, sampled, advantages.reshape(-1, 1).astype(np.float32)


def train(llm: LLM, steps: int, seed: int) -> list[float]:
    """Train the decoder, and return the mean reward of each step; the tower stays as it is."""
    model = ScoredModel.of(llm)
    fixed = dict(llm.params)
    trained = fixed.pop("language_model")
    state, chance, curve = OPTIMIZER.init(trained), random.Random(seed), []
    for step in range(steps):
        start = time.perf_counter()
        scenes = sample_scenes(NUM_PROMPTS, chance)
        params = SamplingParams(
            n=NUM_ANSWERS, seed=seed * 10_000 + step, temperature=1.0, max_tokens=8, logprobs=0
        )
        chats = [ask(scene) for scene in scenes]
        outputs = llm.chat(chats, params, return_mm_inputs=True, use_tqdm=False)
        rewards = np.array(
            [
                [reward(answer.text, scene) for answer in output.outputs]
                for output, scene in zip(outputs, scenes, strict=True)
            ]
        )
        data = make_batch(model, outputs, rewards)
        trained, state, distance = train_step(trained, state, fixed, model, data)
        llm.update_weights({"language_model": trained})
        curve.append(float(rewards.mean()))
        spent = time.perf_counter() - start
        print(
            f"step {step + 1:3}: reward {curve[-1]:.2f}, |ratio - 1| <= {float(distance):.0e}, "
            f"{spent:.1f} s",
            flush=True,
        )
    return curve


def main() -> None:
    """Train, show answers before and after, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("grpo_tiny_scenes"))
    flags = parser.parse_args()
    unseen = sample_scenes(64, random.Random(f"unseen {flags.seed}"))
    size = NUM_PROMPTS * NUM_ANSWERS
    with LLM(max_num_seqs=size, max_model_len=128, use_tqdm_on_load=False) as llm:
        print(f"before: reward {show(llm, unseen):.2f}")
        curve = train(llm, flags.steps, flags.seed)
        print(f"after: reward {show(llm, unseen):.2f}")
        save_checkpoint(llm.params, llm, flags.out)
    points = [(step + 1, value) for step, value in enumerate(curve)]
    panel = LinePanel("mean reward", {f"seed {flags.seed}": points})
    svg = draw_lines([[panel]], QUESTION, unit="steps")
    (flags.out / "reward.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
