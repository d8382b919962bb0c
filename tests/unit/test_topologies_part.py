"""One child process: readiness, death, restart, and that nothing outlives its parent.

Oracle: the kernel's process table. Cannot see: whole pools (tests/integration/test_pool_*).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest
from kvcast.topologies.part import Part, PartError

_READY = "import json,time; print(json.dumps({'event':'ready','port':7}), flush=True); "


def _part(tmp_path: Path, code: str, **more: bool) -> Part:
    return Part("thing", [sys.executable, "-c", code], log_path=tmp_path / "thing.log", **more)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_the_ready_lines_facts_are_handed_out_and_all_output_is_logged(
    tmp_path: Path,
) -> None:
    part = _part(tmp_path, "print('hello', flush=True);" + _READY + "time.sleep(60)")
    await part.start()
    try:
        assert await part.wait_ready(60) == {"event": "ready", "port": 7}
        assert part.pid is not None
        assert "hello" in part.log_tail()
    finally:
        await part.stop()
    assert part.pid is None


async def test_a_part_that_dies_before_it_is_ready_is_told_with_its_log(tmp_path: Path) -> None:
    part = _part(tmp_path, "import sys; print('no such port', file=sys.stderr); sys.exit(4)")
    await part.start()
    with pytest.raises(PartError, match=r"(?s)thing.*exit status 4.*no such port"):
        await part.wait_ready(60)
    await part.stop()


async def test_a_part_that_is_never_ready_ends_the_wait(tmp_path: Path) -> None:
    part = _part(tmp_path, "import time; time.sleep(60)")
    await part.start()
    try:
        with pytest.raises(PartError, match=r"not ready after 0\.2 s"):
            await part.wait_ready(0.2)
    finally:
        await part.stop()


async def test_a_command_that_does_not_exist_is_an_error_of_the_part(tmp_path: Path) -> None:
    part = Part("ghost", ["/no/such/program"], log_path=tmp_path / "log")
    with pytest.raises(PartError, match="ghost: cannot run /no/such/program"):
        await part.start()
    await part.stop()


async def test_a_killed_part_can_be_started_again(tmp_path: Path) -> None:
    part = _part(tmp_path, _READY + "time.sleep(60)")
    await part.start()
    await part.wait_ready(60)
    first = part.pid
    await part.kill()
    assert part.pid is None
    await part.start()
    await part.wait_ready(60)
    assert part.pid not in (None, first)
    assert part.starts == 2
    await part.stop()


async def test_a_part_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    part = _part(tmp_path, code + _READY + "time.sleep(60)")
    await part.start()
    await part.wait_ready(60)
    await part.stop(grace_s=0.2)
    assert part.returncode == -9


async def test_a_grandchild_that_keeps_the_output_open_does_not_block_the_end(
    tmp_path: Path,
) -> None:
    code = (
        "import subprocess,sys; p=subprocess.Popen([sys.executable,'-c','import time;"
        "time.sleep(120)']); print(p.pid, flush=True);" + _READY + "time.sleep(60)"
    )
    part = _part(tmp_path, code)
    await part.start()
    await part.wait_ready(60)
    grandchild = int(part.log_path.read_text().splitlines()[1])
    try:
        await asyncio.wait_for(part.stop(), 60)
    finally:
        os.kill(grandchild, 9)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio, sys
        from pathlib import Path
        from kvcast.topologies.part import Part

        async def main():
            part = Part("child", [sys.executable, "-c", {_READY!r} + "time.sleep(60)"],
                        log_path=Path({str(tmp_path / "child.log")!r}))
            await part.start()
            await part.wait_ready(60)
            print(part.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert _is_alive(child)
        parent.kill()
    deadline = time.monotonic() + 60
    while _is_alive(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


async def test_who_stops_a_part_is_cancelled_though_it_ends_at_that_moment(tmp_path: Path) -> None:
    part = _part(tmp_path, "")
    ended = asyncio.get_running_loop().create_future()

    async def wait() -> int:
        return int(await ended)

    process = mock.create_autospec(asyncio.subprocess.Process, instance=True, returncode=None)
    process.wait = wait
    part._process = process
    stopping = asyncio.create_task(part.stop())
    await asyncio.sleep(0)
    ended.set_result(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping


def test_parts_start_whole_from_a_benchmark_that_speaks_grpc() -> None:
    code = """
        import subprocess
        import kvcast.bench, grpc
        from concurrent.futures import ThreadPoolExecutor
        from kvcast.topologies.part import die_with_parent
        server = grpc.server(ThreadPoolExecutor(1))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        grpc.channel_ready_future(channel).result(60)
        for _ in range(150):
            subprocess.run(["true"], preexec_fn=die_with_parent(), check=True)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
