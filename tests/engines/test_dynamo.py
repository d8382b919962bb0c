"""Dynamo's own indexer listens to what the connector says of the pool.

Oracle: Dynamo's answers about prompts whose blocks were, or were not, said to be saved. Cannot
see: Dynamo's router and its workers, which need its runtime and accelerators.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile

import pytest
from engines_harness import HERE, PYTHON, needs_engines, needs_package

pytestmark = [
    needs_engines,
    needs_package("dynamo"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


async def test_dynamos_indexer_knows_what_the_pool_holds_of_a_prompt() -> None:
    with tempfile.TemporaryDirectory(prefix="kvs-", dir="/tmp") as folder:  # a short path
        done = await asyncio.to_thread(
            subprocess.run,
            [str(PYTHON), str(HERE / "dynamo_check.py"), folder],
            capture_output=True,
            timeout=200,
            check=False,
        )
    assert done.stdout.decode().endswith("right\n"), done.stderr.decode()[-4000:]
