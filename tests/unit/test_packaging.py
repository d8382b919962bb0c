"""What must be installed for what: the client alone, each command, and what they say that lack it.

Oracle: pyproject.toml, and processes in which an import is blocked. Cannot see: pip.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from kvcast.cli.main import COMMANDS, EXTRAS

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def _distributions(extra: str) -> set[str]:
    """What an extra of pyproject.toml installs, those that it includes followed."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        included = re.match(r"kvcast\[(.*)\]", requirement)
        if included is None:
            found.add(re.split(r"[<>=]", requirement)[0])
        else:
            found |= {d for each in included[1].split(",") for d in _distributions(each)}
    return found


def _without(blocked: str, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python in which a module cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{blocked!r}] = None; {code}", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_client_imports_msgspec_and_xxhash_and_nothing_else() -> None:
    code = (
        "import sys, json\n"
        "before = set(sys.modules)\n"  # site's own, by which an editable install is found
        "import kvcast.hostagent.client\n"
        "print(json.dumps(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(json.loads(done.stdout)) - sys.stdlib_module_names
    # msgspec looks whether there is a typing_extensions, and does without.
    assert imported - {"typing_extensions"} == {"kvcast", "msgspec", "xxhash"}
    assert {re.split(r"[<>=]", each)[0] for each in PROJECT["dependencies"]} == {
        "msgspec",
        "xxhash",
    }


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_a_command_looks_for_what_its_extra_installs(extra: str) -> None:
    installed_by = importlib.metadata.packages_distributions()
    names = {
        "protobuf" if module == "google.protobuf" else installed_by[module][0]
        for module in EXTRAS[extra]
    }
    assert {name.replace("_", "-") for name in names} == _distributions(extra)


def test_all_is_all() -> None:
    named = {command.extra for command in COMMANDS.values()} - {""}
    assert {d for extra in named for d in _distributions(extra)} == _distributions("all")


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].extra])
def test_a_command_without_its_extra_says_in_a_line_what_to_install(name: str) -> None:
    extra = COMMANDS[name].extra
    blocked = EXTRAS[extra][-1]
    run = "from kvcast.cli import main; sys.exit(main.main(sys.argv[1:]))"
    ran = _without(blocked, run, *name.split(), "--help")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        f"kvcast {name} needs pip install 'kvcast[{extra}]' (missing: {blocked})\n"
    )


@pytest.mark.parametrize("name", [name for name in COMMANDS if not COMMANDS[name].extra])
def test_the_other_commands_need_no_extra(name: str) -> None:
    every = sorted({module.partition(".")[0] for extra in EXTRAS.values() for module in extra})
    run = (
        f"sys.modules.update(dict.fromkeys({every!r}));"
        "from kvcast.cli import main; sys.exit(main.main(sys.argv[1:]))"
    )
    ran = _without("aiohttp", run, *name.split(), "--help")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"usage: kvcast {name}")


def test_the_switchs_second_name_says_the_same() -> None:
    run = "from kvcast.cli import main; sys.exit(main.simple_switch_grpc())"
    ran = _without("llvmlite", run, "--help")
    assert ran.returncode == 1
    assert ran.stderr == (
        "kvcast-simple-switch-grpc needs pip install 'kvcast[switch]' (missing: llvmlite)\n"
    )
