"""What it costs until a first token: computing a prefix, against bringing it from elsewhere.

Owns: the model of costs, and its units. Must not know: who holds what, or how loaded anybody is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Of one model on one kind of engine. Times in seconds, sizes in bytes, lengths in tokens.

    Computing tokens `first` to `last` of a prompt takes
    `prefill_s_per_token * (last - first) + attention_s_per_token2 * (last² - first²) / 2`: the
    second term is attention over everything before. The defaults are an 8-billion-parameter model
    with grouped-query attention in 16 bits on one current accelerator, and a pool over 100 Gb/s of
    which half arrives: see docs/routing.md for how to find yours.
    """

    prefill_s_per_token: float = 1 / 8000
    attention_s_per_token2: float = 2e-9
    kv_bytes_per_token: int = 131072
    pool_bytes_per_s: float = 6e9
    """What one engine gets from the pool, alone."""
    pool_latency_s: float = 0.002
    """From asking the pool to its first byte."""
    host_bytes_per_s: float = 2.5e10
    """From the engine's own host memory."""

    def __post_init__(self) -> None:
        if self.prefill_s_per_token <= 0 or self.attention_s_per_token2 < 0:
            raise ValueError("computing a token takes time")
        if self.kv_bytes_per_token <= 0:
            raise ValueError("a token's KV has bytes")
        if self.pool_bytes_per_s <= 0 or self.host_bytes_per_s <= 0 or self.pool_latency_s < 0:
            raise ValueError("a rate is above 0, and a latency is not below it")

    def compute_s(self, first: int, last: int) -> float:
        """Seconds to compute tokens `first` (0 = the prompt's beginning) to `last`, exclusive."""
        if last <= first:
            return 0.0
        linear = self.prefill_s_per_token * (last - first)
        return linear + self.attention_s_per_token2 * (last * last - first * first) / 2

    def pool_s(self, tokens: int) -> float:
        """Seconds that bringing so many tokens from the pool takes."""
        if tokens <= 0:
            return 0.0
        return self.pool_latency_s + tokens * self.kv_bytes_per_token / self.pool_bytes_per_s

    def host_s(self, tokens: int) -> float:
        """Seconds that bringing so many tokens from the engine's own host takes."""
        return max(0, tokens) * self.kv_bytes_per_token / self.host_bytes_per_s
