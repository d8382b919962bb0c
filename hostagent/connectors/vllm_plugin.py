"""What vLLM loads at its start where kvcast is installed: the entry point `vllm.general_plugins`.

Owns: that vLLM knows the tier's name. Must not know: the tier; nothing of it is imported before it
is configured. vLLM may call this several times in a process, and in each of its processes.
"""

from __future__ import annotations

TIER = "kvcast"
"""The `type` of a secondary tier in vLLM's configuration."""


def register() -> None:
    """Make the tier known to vLLM, where its version has secondary tiers."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        return  # an older vLLM
    try:
        SecondaryTierFactory.register_tier(
            TIER, "kvcast.hostagent.connectors.vllm_tier", "KvcastTier"
        )
    except ValueError:
        pass  # it is registered
