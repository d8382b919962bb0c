"""What a class's source says of its attributes.

Oracle: the classes written below. Cannot see: whether what is said is true.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvcast.service.attribute_texts import texts_of, words_of


@dataclass(slots=True)
class Counters:
    """Of something."""

    plain: int = 0
    told: int = 0
    """Told in
    two lines, with a \\ in them."""
    after: int = 0

    """Told after an empty line."""

    def method(self) -> None:
        """No attribute."""


class Heir(Counters):
    pass


class Reasons(enum.Enum):
    ONE = "one"
    TWO = "two"
    """The second."""


def test_the_string_below_an_attribute_is_found_and_comes_in_one_line() -> None:
    assert texts_of(Counters) == {
        "told": "Told in two lines, with a \\ in them.",
        "after": "Told after an empty line.",
    }
    assert texts_of(Reasons) == {"TWO": "The second."}


def test_nothing_is_said_of_inherited_attributes() -> None:
    assert texts_of(Heir) == {}


def test_nothing_is_said_of_a_class_without_source() -> None:
    assert texts_of(type("Made", (), {"__module__": __name__})) == {}
    made = type("Made", (), {"__module__": "itertools"})  # a module in C
    assert texts_of(made) == {}


def test_a_name_is_spelled_as_words() -> None:
    assert words_of("reads_waiting") == "Reads waiting"
