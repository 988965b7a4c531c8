"""What rounding to a dtype changes: mmjax's and HF's logits beside those of their float32 runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from mmjax.config.engine_config import ModelConfig, Quantization
from mmjax.models.registry import load_model_class
from mmjax.parity.arrays import PagedModel
from mmjax.parity.case import Case, Parity
from mmjax.parity.compare import LOGITS, Difference, measure
from mmjax.parity.reference import load_reference, run_reference_logits

SURE_GAP = 0.05
"""Between float32's two highest logits: a smaller one may be turned over by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedReport:
    """The comparison of one prompt."""

    name: str
    ours: Difference
    """Of mmjax's logits at all prompt positions, from its float32 run."""
    reference: Difference
    """Of HF's, from its float32 run."""
    num_sure: int
    """Greedy tokens of the float32 run before the first whose gap is below `SURE_GAP`."""
    num_same: int
    """Greedy tokens that are the same in both dtypes, from the first on."""

    @property
    def is_good(self) -> bool:
        """Return whether all tokens are the same that rounding cannot turn over."""
        return self.num_same >= self.num_sure


class RoundedParity:
    """A checkpoint loaded by mmjax and by HF, in float32 and in another dtype."""

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        dtype: str,
        quantization: Quantization | None = None,
        max_len: int,
    ) -> None:
        """`quantization`: of mmjax's weights; HF's stay whole."""
        self.exact = Parity(model_config, max_len=max_len)
        self.ours = PagedModel.from_directory(
            model_config.path,
            load_model_class(model_config.architecture),
            model_config.hf_config,
            max_len=max_len,
            dtype=jnp.dtype(dtype),
            quantization=quantization,
        )
        self.reference = load_reference(model_config.path, model_config.architecture, dtype)

    def run(self, case: Case, *, max_tokens: int) -> RoundedReport:
        """Run all four models; raises as `Parity.check`."""
        sample = self.exact.check(case, max_tokens)
        inputs: Any = self.exact.process_reference(case)
        exact, rounded = (
            run_reference_logits(model, inputs) for model in (self.exact.reference, self.reference)
        )
        logits = self.exact.ours.decode(sample, max_tokens)
        second, first = np.sort(logits, axis=1)[:, -2:].T
        is_sure = first - second >= SURE_GAP
        is_same = logits.argmax(1) == self.ours.decode(sample, max_tokens).argmax(1)
        return RoundedReport(
            name=case.name,
            ours=measure(
                LOGITS, self.ours.run(sample)[LOGITS], self.exact.ours.run(sample)[LOGITS]
            ),
            reference=measure(LOGITS, rounded, exact),
            num_sure=_count_leading(is_sure),
            num_same=_count_leading(is_same),
        )


def _count_leading(flags: np.ndarray) -> int:
    return int(np.logical_and.accumulate(flags).sum())


def format_rounded(reports: Sequence[RoundedReport], dtype: str) -> str:
    """Return a line per case, and the result."""
    width = max(len(report.name) for report in reports)
    lines = [
        f"logits in {dtype} beside those in float32; greedy tokens the same, and those that a gap "
        f"of {SURE_GAP:g} makes sure",
        f"{'case':<{width}}  {'mmjax max':>9}  {'mean':>9}  {'HF max':>9}  {'mean':>9}"
        f"  {'peak':>9}  {'same':>4}  {'sure':>4}",
    ]
    lines += [
        f"{report.name:<{width}}  {report.ours.max_abs:9.2e}  {report.ours.mean_abs:9.2e}"
        f"  {report.reference.max_abs:9.2e}  {report.reference.mean_abs:9.2e}"
        f"  {report.ours.peak:9.2e}  {report.num_same:4}  {report.num_sure:4}"
        for report in reports
    ]
    is_good = all(report.is_good for report in reports)
    return "\n".join([*lines, f"greedy tokens: {'as sure' if is_good else 'NOT as sure'}"])
