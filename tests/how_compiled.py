"""How tests' programs are compiled on a CPU: as those that users run, or in half the time.

Imports nothing of JAX, which reads its environment when it is imported.
"""

EMITTERS = "xla_cpu_use_fusion_emitters"
"""XLA's option of how fusions become LLVM's code: by MLIR, or at once, in three quarters of the
time where LLVM then optimizes little."""


def environment(flags: str, *, is_served: bool) -> dict[str, str]:
    """Return variables of processes that compile so; `flags` are those of `XLA_FLAGS` today."""
    others = [flag for flag in flags.split() if EMITTERS not in flag]
    more = [] if is_served else [f"--{EMITTERS}=false"]
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(not is_served)),
        "XLA_FLAGS": " ".join([*others, *more]),
    }
