"""What a class's source says of its attributes: the string below each of them.

Owns: how such strings are found, as Python does not keep them. Must not know: what they are for
(exporters of metrics show them, so that each counter is explained in one place).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from functools import cache


@cache
def texts_of(cls: type) -> dict[str, str]:
    """By attribute, the string that follows its definition in the body of a class, in one line;
    attributes without one are left out. Of inherited attributes nothing is said. Empty where there
    is no source to read."""
    texts: dict[str, str] = {}
    for definition, below in itertools.pairwise(_body_of(cls)):
        target: ast.expr
        if isinstance(definition, ast.AnnAssign):
            target = definition.target
        elif isinstance(definition, ast.Assign):
            target = definition.targets[0]
        else:
            continue
        if not isinstance(target, ast.Name) or not isinstance(below, ast.Expr):
            continue
        text = below.value
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            texts[target.id] = " ".join(text.value.split())
    return texts


def words_of(name: str) -> str:
    """An attribute's name as words, for those that nothing is said of."""
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def _body_of(cls: type) -> list[ast.stmt]:
    """What stands in a class at the top of its module."""
    try:
        source = inspect.getsource(sys.modules[cls.__module__])
    except (OSError, TypeError):  # no source, or a module in C
        return []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__qualname__:
            return node.body
    return []
