"""What the commands for people share: errors in one line, interrupts, exit codes.

Owns: how a command's failure is told. Must not know: any one command.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from kvcast.service.options import LOG_LEVELS, HelpFormatter

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MISS = 3
"""The block asked for is not in the pool."""
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot do what was asked; the text says why, in one line if it can."""


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """--log-level, as all commands have it."""
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default="warning", help="debug shows tracebacks"
    )


def command_parser(program: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A command's parser, with its examples below the flags."""
    return argparse.ArgumentParser(
        prog=program, description=description, epilog=examples, formatter_class=HelpFormatter
    )


def build_subcommands(
    program: str, description: str, examples: str, subject: argparse.ArgumentParser
) -> tuple[argparse.ArgumentParser, Callable[[str, str], argparse.ArgumentParser]]:
    """A parser of a program with commands (`command` of its result), and what adds one by name and
    help; each begins with the arguments of `subject`."""
    parser = command_parser(program, description, examples)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=examples,
            formatter_class=HelpFormatter,
            parents=[subject],
        )

    return parser, add


def run_command(main: Callable[[], Coroutine[Any, Any, int]], *, log_level: str) -> int:
    """Run a command's coroutine; its exit status.

    Interrupts (SIGINT, SIGTERM) cancel it, so that whatever it started is ended. An error that
    the command knows ends in one line on standard error, and so does any other unless the log
    level is "debug".
    """
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr)
    try:
        return asyncio.run(_until_signal(main))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return interrupted()
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return EXIT_FAILED
    except Exception as error:
        if log_level == "debug":
            raise
        return failed(error)


def interrupted() -> int:
    """Tell that somebody ended the command; the exit status."""
    print("kvcast: interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


def failed(error: BaseException | str, program: str = "kvcast") -> int:
    """Tell a failure in one line; the exit status."""
    text = error if isinstance(error, str) else explain(error)
    print(f"{program}: {text}", file=sys.stderr)
    return EXIT_FAILED


def explain(error: BaseException) -> str:
    """An error for people: known ones by their text, unknown ones with their type."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    text = str(error).strip()
    module = type(error).__module__
    ours = module.startswith("kvcast.") or module == "__main__"
    if text and (ours or isinstance(error, OSError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def _until_signal(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await main()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
