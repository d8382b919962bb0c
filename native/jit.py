"""IR text to running machine code, with compiled code kept on disk.

Owns LLVM's set-up, the passes, and the cache: one file of object code for each key (`.o`), and one
that names it for each state of the sources (`.of`), in $XDG_CACHE_HOME/kvcast/native (or
~/.cache/...), written whole (rename) and readable by its owner only. A file is `MAGIC, SHA-256 of
the rest, object code`; one that does not agree, or belongs to somebody else, is made anew. Must
not know P4.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger("kvcast.native.jit")

MAGIC = b"kvcast object 1\n"
MAX_CACHED = 512
"""Files of a kind in the cache, of at most some 40 KB; the least recently used go. An agent loads
two dozen, a switch one for each program."""
PROCESSOR_VARIABLE = "KVCAST_NATIVE_PROCESSOR"
"""LLVM's name of the processor to compile for, where it is not to be this one with all that it can
do: machines that are alike, or emulated, then run what another has compiled."""

_lock = threading.Lock()
"""LLVM's context and linker are shared by all that is compiled and loaded in the process."""


@cache
def _set_up() -> Any:
    """LLVM's binding, imported when something is compiled or loaded, and not before: whoever only
    declares what can be compiled needs no llvmlite."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _processor() -> tuple[str, str]:
    """LLVM's name of the processor to compile for, and what it can do beyond that."""
    named = os.environ.get(PROCESSOR_VARIABLE)
    if named:
        return named, ""
    llvm = _set_up()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _target_machine() -> Any:
    llvm = _set_up()
    target = llvm.Target.from_default_triple()
    cpu, features = _processor()
    return target.create_target_machine(
        cpu=cpu,
        features=features,
        opt=2,
        reloc="pic",
        codemodel="default",
        jit=True,
    )


def machine() -> str:
    """What compiled code depends on, the program apart."""
    import llvmlite

    llvm = _set_up()
    return "\n".join(
        (
            llvmlite.__version__,
            ".".join(str(n) for n in llvm.llvm_version_info),
            llvm.get_process_triple(),
            *_processor(),
        )
    )


def _compile(text: Callable[[str, str], str]) -> bytes:
    with _lock:
        llvm = _set_up()
        target = _target_machine()
        module = llvm.parse_assembly(text(target.triple, str(target.target_data)))
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=1)
        options.loop_vectorization = False
        options.slp_vectorization = False
        options.loop_unrolling = False
        options.inlining_threshold = 75
        builder = llvm.create_pass_builder(target, options)
        builder.getModulePassManager().run(module, builder)
        return bytes(target.emit_object(module))


class Library:
    """Loaded code. Addresses are good while the object lives."""

    def __init__(self, object_code: bytes, exports: Sequence[str]) -> None:
        with _lock:
            llvm, engine = _set_up(), _engine()
            builder = llvm.JITLibraryBuilder().add_object_img(object_code).add_current_process()
            for name in exports:
                builder.export_symbol(name)
            _loaded[0] += 1
            self._tracker = builder.link(engine, f"native.{_loaded[0]}")
        self.addresses: Mapping[str, int] = {name: self._tracker[name] for name in exports}


_loaded = [0]


@cache
def _engine() -> Any:
    # Unlike LLVM's older linker, JITLink puts all of an object side by side, so that code reaches
    # its constants however far apart the free parts of the address space lie.
    return _set_up().create_lljit_compiler(_target_machine(), use_jit_link=True)


def load(
    key: str,
    text: Callable[[str, str], str],
    exports: Sequence[str],
    cache_folder: Path | None,
) -> Library:
    """The library of this key: out of the cache, or compiled from `text(triple, data layout)`.

    Without a folder nothing is kept.
    """
    if cache_folder is None:
        return Library(_compile(text), exports)
    path = cache_folder / f"{_name(key)}.o"
    found = _load(path, exports)
    if found is not None:
        return found
    code = _compile(text)
    _write(path, code)
    return Library(code, exports)


def load_made(
    sources: str | None,
    make: Callable[[], Callable[[str, str], str]],
    exports: Sequence[str],
    cache_folder: Path | None,
) -> Library:
    """The library whose IR is made by `make()(triple, data layout)`.

    Making IR takes longer than loading code, so it is made only if the cache does not know yet
    which code belongs to these `sources` (whatever decides on the IR; None = not known). Sources
    that differ in nothing that matters share the code.
    """
    link = None
    if cache_folder is not None and sources is not None:
        link = cache_folder / f"{_name(sources)}.of"
        name = _read(link)
        found = None if name is None else _load(cache_folder / name.decode(), exports)
        if found is not None:
            return found
    text = make()
    key = text("", "")
    library = load(key, text, exports, cache_folder)
    if link is not None:
        _write(link, f"{_name(key)}.o".encode())
    return library


def _name(key: str) -> str:
    return hashlib.sha256(f"{machine()}\n{key}".encode()).hexdigest()


def _load(path: Path, exports: Sequence[str]) -> Library | None:
    code = _read(path)
    if code is not None:
        try:
            return Library(code, exports)
        except RuntimeError as error:
            log.warning("compiled code in the cache does not load: %s", error)
    return None


def default_cache() -> Path | None:
    """The folder of the cache; None if this user cannot have one."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "kvcast" / "native"
    try:
        return Path.home() / ".cache" / "kvcast" / "native"
    except RuntimeError:
        return None


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if info.st_uid != os.geteuid() or info.st_mode & 0o022:
                log.warning("%s is somebody else's to write, and not used", path)
                return None
            data = file.read()
            with suppress(OSError):
                os.utime(file.fileno())
    except OSError:
        return None
    start = len(MAGIC) + 32
    code = data[start:]
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : start] != hashlib.sha256(code).digest():
        log.warning("%s is damaged, and made anew", path)
        return None
    return code


def _write(path: Path, code: bytes) -> None:
    """Keep the code; a cache that cannot be written is only slow."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + hashlib.sha256(code).digest() + code)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _evict(path.parent)
    except OSError as error:
        log.warning("compiled code is not kept: %s", error)


def _evict(folder: Path) -> None:
    for kind in ("*.o", "*.of"):
        for old in sorted(folder.glob(kind), key=_used_at)[:-MAX_CACHED]:
            old.unlink(missing_ok=True)


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just made room, too
        return 0.0
