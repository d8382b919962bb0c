"""What documents and comments name exists: files, modules, classes, names, flags, sections.

Oracle: the tree, and each command's own help. Cannot see: whether what is said of them is true.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kvcast.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"))
    if path.name != "CHANGELOG.md"  # which tells of what was
)
_FOLDERS = tuple(
    path.name
    for path in ROOT.iterdir()
    if path.is_dir() and not path.name.startswith(".") and path.name != "build"
)
_KINDS = (".py", ".p4", ".md", ".toml")
_FLAGS_OF_OTHERS = {
    *("--create-namespace", "--now", "--shm-size", "--values"),  # helm, systemctl, docker
    *("--enable-hierarchical-cache", "--hicache-mem-layout"),  # SGLang
    *("--hicache-storage-backend-extra-config", "--page-size"),
    *("--api-key", "--enable-prefix-caching", "--hash-algorithm"),  # vLLM, LMCache
    *("--max-tests", "--output-packet-only", "--path-selection"),  # p4testgen
}
_OF_OUR_CODE = ("CONTRIBUTING.md", "architecture.md", "simulation.md", "testing.md")
"""Documents in which a name with an underscore is one of our code."""


class Said(NamedTuple):
    """A name, and where it stands."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}: {self.name}"


@functools.cache
def tree() -> dict[str, Path]:
    """All files and folders by their path from the root; those that tools make are left out."""
    found = {}
    for top in (ROOT, *(ROOT / name for name in _FOLDERS)):
        for folder, folders, files in os.walk(top):
            here = Path(folder)
            if top == ROOT:
                folders.clear()
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in (*files, *folders):
                found[(here / name).relative_to(ROOT).as_posix()] = here / name
    return found | {name: ROOT / name for name in _FOLDERS}


@functools.cache
def sources() -> dict[Path, str]:
    """All Python and P4 files."""
    return {
        path: path.read_text(encoding="utf-8")
        for path in tree().values()
        if path.suffix in (".py", ".p4") and path.is_file()
    }


def spans(text: str) -> Iterator[str]:
    """What is marked as code, blocks of it line by line."""
    for block in re.findall(r"```\w*\n(.*?)```", text, re.S):
        yield from block.replace("\\\n", " ").splitlines()
    for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S)):
        yield " ".join(span.split())


def said(pattern: str) -> Iterator[tuple[Said, re.Match[str]]]:
    """All that is marked as code in documents and matches."""
    for path in DOCUMENTS:
        for span in spans(path.read_text(encoding="utf-8")):
            for match in re.finditer(pattern, span):
                yield Said(path, match[0]), match


def is_there(name: str) -> bool:
    """Whether a file or folder is in the tree; its first folders may be left out."""
    name = name.rstrip("/")
    paths = tree()
    if "*" in name:
        return any(fnmatch.fnmatch(f"/{path}", f"*/{name}") for path in paths)
    return any(f"/{path}".endswith(f"/{name}") for path in paths)


def test_the_files_that_documents_name_exist() -> None:
    missing = set()
    for where, match in said(r"(?<![\w./:<>$~-])[\w*-][\w./*-]*[\w*/]"):
        name = match[0]
        of_ours = name.partition("/")[0] in _FOLDERS and "/" in name
        if (of_ours or name.endswith(_KINDS)) and not is_there(name) and name != "FILE.toml":
            missing.add(str(where))
    assert not missing


def heading_of(line: str) -> str:
    """A heading as links name it."""
    text = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
    return text.replace(" ", "-")


def test_links_lead_somewhere() -> None:
    broken = set()
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, section = target.partition("#")
            if "://" in name:
                continue
            there = path.parent / name if name else path
            if not there.exists():
                broken.add(str(Said(path, target)))
            elif section:
                lines = there.read_text(encoding="utf-8").splitlines()
                if section not in {heading_of(line) for line in lines if line.startswith("#")}:
                    broken.add(str(Said(path, target)))
    assert not broken


def defines(path: Path, name: str) -> bool:
    """Whether a module defines a name, or a class in it does."""
    return bool(
        re.search(
            rf"^\s*(?:(?:async )?def|class|type) {name}\b|^\s*{name}(?:\[.*\])?\s*[:=]"
            rf"|^\s*(?:self|mine)\.{name}\b|\b{name}: ",
            sources()[path],
            re.M,
        )
    )


def is_module(name: str) -> bool:
    """Whether there is such a module or folder, or such a name in one."""
    first, *rest = name.split(".")[1:]
    here = ROOT / first
    while rest and (here / rest[0]).is_dir():
        here /= rest.pop(0)
    if rest and (here / f"{rest[0]}.py").is_file():
        here /= f"{rest.pop(0)}.py"
    if here.is_dir():
        here /= "__init__.py"
    return not rest or (here in sources() and all(defines(here, one) for one in rest))


def test_the_modules_that_documents_and_docstrings_name_exist() -> None:
    pattern = re.compile(rf"\bkvcast(?:\.(?:{'|'.join(_FOLDERS)}))(?:\.\w+)+")
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    texts |= {path: text for path, text in sources().items() if ROOT / "tests" not in path.parents}
    missing = {
        str(Said(path, name))
        for path, text in texts.items()
        for name in set(pattern.findall(text))
        if not is_module(name)
    }
    assert not missing


def test_the_members_that_documents_name_exist() -> None:
    missing = set()
    for where, match in said(r"^([A-Z]\w+)\.(_?[a-z]\w+)(?:\(.*\))?$"):
        owners = [path for path, text in sources().items() if f"class {match[1]}" in text]
        if owners and not any(defines(path, match[2]) for path in owners):
            missing.add(str(where))
    assert not missing


@functools.cache
def help_of(*words: str) -> str:
    """What a command says of itself."""
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    command = COMMANDS[name]
    main = getattr(importlib.import_module(command.module), command.function)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        main([*words[len(name.split()) :], "--help"])
    return out.getvalue()


def flags_of(*words: str) -> set[str]:
    """The flags of a command, as it says itself."""
    return set(re.findall(r"--[a-z][\w-]*", help_of(*words)))


def test_no_command_says_a_default_twice() -> None:
    twice = re.compile(r"\(default: [^()]*\)\s+\(default:")
    assert not [name for name in COMMANDS if twice.search(help_of(*name.split()))]


def test_the_flags_that_documents_give_to_our_commands_exist() -> None:
    wrong = set()
    for where, match in said(r"\bkvcast ((?:[a-z][a-z-]* ?)+)[^|;#]*"):
        words = match[1].split()
        if words[0] in COMMANDS:
            has_commands = words[0] in ("bench", "certs", "tokens", "namespace")
            both = " ".join(words[:2]) in COMMANDS or has_commands
            known = flags_of(*words[: 1 + both])
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", match[0]):
                if flag not in known:
                    wrong.add(f"{where.path.name}: {match[0]}: {flag}")
    assert not wrong


def main_of(module: str) -> Callable[[], object]:
    """What `python -m` runs."""
    path = ROOT.joinpath(*module.split(".")[1:])
    if path.is_dir():
        found = re.search(r"^from (\S+) import main$", sources()[path / "__main__.py"], re.M)
        assert found is not None, path
        module = found[1]
    main: Callable[[], object] = importlib.import_module(module).main
    return main


def test_the_flags_that_documents_give_to_our_modules_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = re.compile(r"(?<![\w-])--[a-z][\w-]*")
    given: dict[str, set[str]] = {}
    for _, match in said(r"-m (kvcast(?:\.\w+)+)([^|;#]*)"):
        given.setdefault(match[1], set()).update(flags.findall(match[2]))
    assert given
    wrong = set()
    for module, named in given.items():
        out = io.StringIO()
        monkeypatch.setattr("sys.argv", [module, "--help"])
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
            main_of(module)()
        wrong |= {f"{module} {flag}" for flag in named - set(flags.findall(out.getvalue()))}
    assert not wrong


def test_the_flags_that_documents_name_are_somebodys() -> None:
    flags = re.compile(r"--[a-z][\w-]*")
    known = {flag for text in sources().values() for flag in flags.findall(text)}
    known |= (
        _FLAGS_OF_OTHERS | flags_of("namespace", "set") | flags_of("bench", "incast-simulation")
    )
    known = known.union(*(flags_of(*name.split()) for name in COMMANDS))
    unknown = {
        str(where)
        for where, match in said(r"(?<![\w-])--[a-z][\w-]*")
        if not {match[0], match[0].replace("--no-", "--")} & known
    }
    assert not unknown


def rows(document: str, head: str) -> int:
    """Rows of the table of a document that begins so, but for its own headings in bold."""
    _, table = (ROOT / "docs" / document).read_text(encoding="utf-8").split(f"\n| {head} |", 1)
    body = table.split("\n\n", 1)[0].splitlines()[2:]
    return sum(not line.startswith("| **") for line in body)


def test_what_the_readme_counts_is_as_much_in_the_tree() -> None:
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    stages = [
        json.loads((ROOT / f"p4/generated/{target}/resources.json").read_text())["stages"]
        for target in ("tofino1", "tofino2")
    ]
    assert f"and fits ({stages[0]} and {stages[1]} stages)" in said
    counts = {
        "rows, each with tests": rows("security.md", "threat"),
        "planted bugs": rows("simulation.md", "planted"),
        "entry points fuzzed": sum(text.count("\n@entry_point(") for text in sources().values()),
    }
    for what, count in counts.items():
        (least,) = re.findall(rf"[Mm]ore than (\d+) {what}", said)
        assert int(least) < count < 2 * int(least), (what, count)


def test_names_of_code_that_documents_mention_are_in_the_code() -> None:
    words = {word for text in sources().values() for word in re.findall(r"\w+", text)}
    missing = {
        str(where)
        for where, match in said(r"^_?[a-z]\w*_\w+$")
        if where.path.name in _OF_OUR_CODE
        and match[0] not in words
        and not match[0].endswith("_total")  # counters are put together of two names
    }
    assert not missing
