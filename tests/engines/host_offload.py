"""A simulation of vLLM's offload workers on a machine without an accelerator.

vLLM's own copy between an accelerator and the region of host memory, and refuse to start on CPUs.
This worker copies between the CPU engine's cache and the same region, so that everything around it
(scheduler, connector, tiering manager, region, and the tier below) is vLLM's own. For one cache
group, and chunks of one block. Used as `spec_name` HostOffloadingSpec of this module.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies at once, where vLLM's worker would begin a transfer."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._pairs = [
            (one.tensor, region.create_next_worker_view(one.page_size_bytes))
            for one in kv_caches.tensors
        ]
        self._region = region
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, chunk in zip(src_spec.block_ids, dst_spec.chunk_ids, strict=True):
            for cache, offloaded in self._pairs:
                offloaded[int(chunk)].copy_(cache[int(block)])
        self._finished.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for chunk, block in zip(src_spec.chunk_ids, dst_spec.block_ids, strict=True):
            for cache, offloaded in self._pairs:
                cache[int(block)].copy_(offloaded[int(chunk)])
        self._finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Everything is done when it is submitted."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class HostOffloadingSpec(TieringOffloadingSpec):
    """vLLM's tiering with that worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        assert len(kv_caches.group_data_refs) == 1
        assert all(one.tensor.dtype == torch.int8 for one in kv_caches.tensors)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker
