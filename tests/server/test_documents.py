"""Files of operators: what they say, what is wrong with them, and no word of what stands there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.server.documents import Document, read_json, read_yaml
from shoal.server.errors import UserError

Read = Callable[[Path], Document]


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_names_that_an_object_has_twice_are_told(tmp_path: Path, read: Read) -> None:
    text = '{"a": 1, "b": {"c": [{"d": 1, "d": 2, "d": 3}], "a": 2}, "a": 3}'
    content, problems = read(written(tmp_path, text))
    assert content == {"a": 3, "b": {"c": [{"d": 3}], "a": 2}}
    assert sorted(problems) == ["a: it is given twice", "d: it is given twice"]


def test_what_a_mapping_of_yaml_takes_from_another_is_not_given_twice(tmp_path: Path) -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, a: 3}\n"
    content, problems = read_yaml(written(tmp_path, text))
    assert content["other"] == {"a": 3, "b": 2}
    assert problems == []


@pytest.mark.parametrize(
    ("read", "text", "where"),
    [
        (read_json, '{\n"a": s3cret}', "line 2, column 6: "),
        (read_json, '{"a": "s3cret', "line 1, column 7: "),
        (read_json, b'{"a": "s3cret\xff"}', ""),
        (read_json, "", "line 1, column 1: "),
        (read_yaml, "a: *s3cret", "line 1, column 4: "),
        (read_yaml, "a: !s3cret 1", "line 1, column 4: "),
        (read_yaml, "a: 1\n- s3cret", "line 2, column 1: "),
        (read_yaml, "a: [s3cret", "line 1, column 11: "),
        (read_yaml, "a: s3cret: 1", "line 1, column 10: "),
        (read_yaml, "a: 2024-13-45", ""),
        (read_yaml, b"a: s3cret\xff", ""),
    ],
)
def test_what_cannot_be_read_is_told_by_its_place(
    tmp_path: Path, read: Read, text: str | bytes, where: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {where}it is not valid ")
    assert "s3cret" not in message
    assert "\n" not in message


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_a_file_that_is_not_there_is_told(tmp_path: Path, read: Read) -> None:
    with pytest.raises(UserError, match="none: No such file"):
        read(tmp_path / "none")
