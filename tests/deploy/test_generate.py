"""The chart's generated files are current, and the schema says what the values file does."""

import pytest

from deploy.helm.generate import COPIES, VALUES, generated, schema_of


def test_generated_files_are_current() -> None:
    files = generated()
    for path, text in files.items():
        assert path.read_text() == text, "run `python -m deploy.helm.generate`"
    assert {path for path in COPIES.rglob("*") if path.is_file()} <= set(files)


def test_types_are_those_of_the_defaults() -> None:
    schema = schema_of("a: 1\nb: 0.5\nc: x\nd: true\ne: []\nf: {}\ng:\n  h: ''\n")
    types = {name: field["type"] for name, field in schema["properties"].items()}
    assert types == {
        "a": "integer",
        "b": "number",
        "c": "string",
        "d": "boolean",
        "e": "array",
        "f": "object",
        "g": "object",
        "global": "object",
    }


def test_only_empty_objects_take_any_key() -> None:
    schema = schema_of("empty: {}\nfull:\n  key: 1\n")
    assert "additionalProperties" not in schema["properties"]["empty"]
    assert schema["properties"]["full"]["additionalProperties"] is False
    assert schema["additionalProperties"] is False


def test_a_comment_describes_the_key_below_it_and_no_other() -> None:
    schema = schema_of("# The head.\n\n# What it is,\n# in two lines.\na: 1\nb: 1\n")
    assert schema["properties"]["a"]["description"] == "What it is, in two lines."
    assert "description" not in schema["properties"]["b"]


def test_a_mark_adds_and_overrides() -> None:
    schema = schema_of(
        "outer:\n  # How.\n  # @schema {type: [integer, string], minimum: 1}\n  a: 2\n"
    )
    assert schema["properties"]["outer"]["properties"]["a"] == {
        "description": "How.",
        "type": ["integer", "string"],
        "minimum": 1,
    }


def test_a_default_without_a_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 2: .*null"):
        schema_of("a: 1\nb:\n")


def all_enums(schema: object) -> list[list[object]]:
    if isinstance(schema, dict):
        own = [schema["enum"]] if isinstance(schema.get("enum"), list) else []
        return own + [found for inner in schema.values() for found in all_enums(inner)]
    return []


def test_no_choice_is_between_words_and_booleans() -> None:
    # Which `off` in a values file would be.
    for choices in all_enums(schema_of(VALUES.read_text())):
        assert len({type(choice) for choice in choices}) == 1, choices
