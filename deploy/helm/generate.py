"""Makes what the chart holds a copy of: the schema of its values, dashboards, and rules.

``python -m deploy.helm.generate`` writes them. Helm reads no file from outside of a chart's folder,
so dashboards and rules are there once more.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "shoal"
VALUES = CHART / "values.yaml"
SCHEMA = CHART / "values.schema.json"
COPIES = CHART / "files"
_GRAFANA = Path(__file__).parents[2] / "grafana"
ORIGINALS: Mapping[str, Path] = {
    "dashboards": _GRAFANA / "dashboards",
    "rules": _GRAFANA / "prometheus" / "rules",
}
"""Folder under ``COPIES`` -> what it is a copy of."""

_TYPES: Mapping[str, str] = {
    "tag:yaml.org,2002:str": "string",
    "tag:yaml.org,2002:int": "integer",
    "tag:yaml.org,2002:float": "number",
    "tag:yaml.org,2002:bool": "boolean",
}
_MARK = "@schema"

Schema = dict[str, Any]


def schema_of(text: str) -> Schema:
    """Return the JSON Schema of a values file.

    A type is that of the default. An object takes no other keys than those it has, unless it is
    empty: then it takes any. The comment above a key describes it, and a line ``# @schema {...}``
    of that comment adds to what follows from the default, or overrides it.

    Args:
        text: the file.

    Raises:
        ValueError: a default has no type.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    schema = _of_node(root, text.splitlines())
    # Helm puts it into the values of every chart that is part of another.
    schema["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _of_node(node: yaml.Node, lines: Sequence[str]) -> Schema:
    if isinstance(node, yaml.SequenceNode):
        return {"type": "array"}
    if isinstance(node, yaml.MappingNode):
        if not node.value:
            return {"type": "object"}
        fields = {key.value: _of_field(key, value, lines) for key, value in node.value}
        return {"type": "object", "properties": fields, "additionalProperties": False}
    if node.tag not in _TYPES:
        raise ValueError(f"line {node.start_mark.line + 1}: {node.tag} is no type of a value")
    return {"type": _TYPES[node.tag]}


def _of_field(key: yaml.Node, value: yaml.Node, lines: Sequence[str]) -> Schema:
    schema = _of_node(value, lines)
    described: list[str] = []
    for comment in _comment_above(key.start_mark.line, lines):
        if comment.startswith(_MARK):
            schema.update(yaml.safe_load(comment.removeprefix(_MARK)))
        else:
            described.append(comment)
    return {"description": " ".join(described), **schema} if described else schema


def _comment_above(line: int, lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the comment that ends just above ``line``."""
    first = line
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
    for comment in lines[first:line]:
        yield comment.strip().removeprefix("#").strip()


def generated() -> dict[Path, str]:
    """Return every generated file of the chart and what is in it."""
    schema = json.dumps(schema_of(VALUES.read_text()), indent=2, ensure_ascii=False) + "\n"
    copies = {
        COPIES / folder / original.name: original.read_text()
        for folder, originals in ORIGINALS.items()
        for original in sorted(originals.iterdir())
    }
    return {SCHEMA: schema, **copies}


def main() -> None:
    """Write the generated files, and remove those whose original is gone."""
    files = generated()
    for folder in ORIGINALS:
        (COPIES / folder).mkdir(parents=True, exist_ok=True)
        for path in (COPIES / folder).iterdir():
            if path not in files:
                path.unlink()
    for path, text in files.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
