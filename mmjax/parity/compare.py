"""Compare activations: differences, the first one out of tolerance, a table.

Names and numpy arrays in, text out: neither torch nor jax.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LOGITS = "logits"
TOLERANCE = 1e-4
"""Absolute for logits; for hidden states, relative to the maximum if that is above 1."""

Activations = Mapping[str, np.ndarray]
"""Outputs by dotted module name, in the order in which they were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of one module's outputs."""

    name: str
    shape: tuple[int, ...]
    max_abs: float
    mean_abs: float
    peak: float
    """Maximum absolute value of the reference."""

    def is_within(self, tolerance: float) -> bool:
        """Return whether the difference is within a tolerance; NaN never is."""
        scale = 1.0 if self.name == LOGITS else max(1.0, self.peak)
        return self.max_abs <= tolerance * scale


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseReport:
    """The comparison of one prompt."""

    name: str
    num_prompt_tokens: int
    num_images: int
    differences: tuple[Difference, ...]
    token_ids: tuple[int, ...]
    """mmjax's greedy output."""
    reference_token_ids: tuple[int, ...]
    num_videos: int = 0
    num_clips: int = 0
    is_prompt_equal: bool = True
    """Whether both processors gave the same token ids."""

    def first_out_of(self, tolerance: float) -> Difference | None:
        """Return the first difference that is out of tolerance."""
        return next((d for d in self.differences if not d.is_within(tolerance)), None)

    def is_within(self, tolerance: float) -> bool:
        """Return whether prompt, hidden states, logits and greedy tokens agree."""
        return (
            self.is_prompt_equal
            and self.first_out_of(tolerance) is None
            and self.token_ids == self.reference_token_ids
        )

    @property
    def logits(self) -> Difference:
        """The last difference: the logits of all prompt positions."""
        return self.differences[-1]


def compare(ours: Activations, reference: Activations) -> tuple[Difference, ...]:
    """Return the differences in the reference's order; infinite for a module that `ours` lacks."""
    return tuple(measure(name, ours.get(name), value) for name, value in reference.items())


def align(ours: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the same rows in the reference's shape, where both have as many, as wide.

    HF has a pack as a batch of one, and may keep the rows and columns of patches apart.
    """
    is_same = ours.size == reference.size and ours.shape[-1:] == reference.shape[-1:]
    return ours.reshape(reference.shape) if is_same else ours


def measure(name: str, ours: np.ndarray | None, reference: np.ndarray) -> Difference:
    """Return the difference of one module's outputs."""
    peak = float(np.abs(reference).max(initial=0.0))
    distance = mean = float("inf")
    if ours is not None:
        ours = align(ours, reference)
    if ours is not None and ours.shape == reference.shape:
        apart = np.abs(ours.astype(np.float64) - reference.astype(np.float64))
        distance, mean = (float(apart.max()), float(apart.mean())) if apart.size else (0.0, 0.0)
    return Difference(name=name, shape=reference.shape, max_abs=distance, mean_abs=mean, peak=peak)


def format_case(report: CaseReport, tolerance: float) -> str:
    """Return a case's table, with a line per module, and its failures."""
    width = max(len(d.name) for d in report.differences)
    lines = [
        f"{report.name}: {report.num_prompt_tokens} prompt tokens, {report.num_images} images"
        + f", {report.num_videos} videos" * (report.num_videos > 0)
        + f", {report.num_clips} clips" * (report.num_clips > 0),
        f"  {'module':<{width}}  {'max abs':>9}  {'mean abs':>9}  {'peak':>9}  shape",
    ]
    for d in report.differences:
        mark = "" if d.is_within(tolerance) else "  <- out of tolerance"
        lines.append(
            f"  {d.name:<{width}}  {d.max_abs:9.2e}  {d.mean_abs:9.2e}  {d.peak:9.2e}"
            f"  {d.shape}{mark}"
        )
    if not report.is_prompt_equal:
        lines.append("  the processors gave different prompt token ids")
    lines.append(f"  {_describe_tokens(report)}")
    return "\n".join(lines)


def _describe_tokens(report: CaseReport) -> str:
    ours, theirs = report.token_ids, report.reference_token_ids
    if ours == theirs:
        return f"{len(ours)} greedy tokens: the same"
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return (
        f"greedy tokens differ from place {at} on: ours {list(ours[at : at + 4])}, "
        f"reference {list(theirs[at : at + 4])}"
    )


def format_summary(
    reports: Sequence[CaseReport], tolerance: float, notes: Sequence[str] = ()
) -> str:
    """Return a line per case, the result, and the notes."""
    width = max(len(report.name) for report in reports)
    lines = [f"{'case':<{width}}  {'logits':>9}  {'states':>9}  tokens  first out of tolerance"]
    for report in reports:
        first = report.first_out_of(tolerance)
        states = max((d.max_abs for d in report.differences[:-1]), default=0.0)
        tokens = "same" if report.token_ids == report.reference_token_ids else "differ"
        lines.append(
            f"{report.name:<{width}}  {report.logits.max_abs:9.2e}  {states:9.2e}  {tokens:<6}  "
            f"{first.name if first else '-'}"
        )
    is_good = all(report.is_within(tolerance) for report in reports)
    lines.append(f"parity: {'yes' if is_good else 'NO'} (tolerance {tolerance:g})")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])
