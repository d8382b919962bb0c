"""What vLLM names blocks by: only what is the same in every engine may name them in a pool.

Oracle: vLLM's own renderer, which says where it names images by a counter; of hashes with a random
seed, what is known of them. Cannot see: engines.
"""

from __future__ import annotations

import subprocess

import pytest
from engines_harness import PYTHON, needs_engines

pytestmark = [needs_engines, pytest.mark.slow, pytest.mark.timeout(300)]

_CHECK = """
from types import SimpleNamespace as Facts
import torch
from vllm.renderers.base import BaseRenderer
from vllm.v1.kv_cache_interface import FullAttentionSpec
from kvcast.hostagent.connectors.vllm import _unsupported

spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
blocks = Facts(kv_cache_groups=[Facts(kv_cache_spec=spec)], hash_block_size=16)
images = Facts(get_all_counts=lambda: {"image": 1})
for cache_gb in (None, 0, 4):
    for prefix_caching in (False, True):
        media = None if cache_gb is None else Facts(mm_processor_cache_gb=cache_gb)
        vllm_config = Facts(
            model_config=Facts(multimodal_config=media),
            cache_config=Facts(enable_prefix_caching=prefix_caching),
            parallel_config=Facts(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        )
        renderer = Facts(
            model_config=vllm_config.model_config,
            config=vllm_config,
            _validate_mm_uuids=lambda *_: None,
        )
        named = BaseRenderer._process_mm_uuids(renderer, {}, images, {}, "renderer0-mm-1")
        by_counter = named == {"image": ["renderer0-mm-1-image-0"]}
        reason = _unsupported(vllm_config, blocks)
        assert bool(reason) == by_counter, (cache_gb, prefix_caching, reason)
print("right")
"""


_SEEDS = """
import os
from types import SimpleNamespace as Facts
from kvcast.hostagent.connectors import vllm

said = []
vllm._log.warning = lambda text, *words: said.append(text % words)
for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
    for seed in (None, "0", "7"):
        os.environ.pop("PYTHONHASHSEED", None)
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        vllm._warn_of_seeds(Facts(cache_config=Facts(prefix_caching_hash_algo=algorithm)))
        told, said[:] = said[:], []
        random = algorithm.startswith("xxhash") and seed is None
        assert bool(told) == random, (algorithm, seed, told)
        assert all(algorithm in text and "PYTHONHASHSEED" in text for text in told)
print("right")
"""


@pytest.mark.parametrize("check", [_CHECK, _SEEDS], ids=["images", "seeds"])
def test_where_vllm_names_blocks_by_chance_the_pool_is_not_used_or_the_operator_told(
    check: str,
) -> None:
    done = subprocess.run(
        [str(PYTHON), "-c", check], capture_output=True, timeout=200, check=False, text=True
    )
    assert done.stdout.endswith("right\n"), done.stderr[-4000:]
