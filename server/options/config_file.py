"""``--config FILE``: options of ``shoal serve`` in a file of YAML or JSON.

The format is that of vLLM's ``FlexibleArgumentParser``: each option under its name, with ``_`` or
``-``, and a mapping where the option takes JSON. That parser silently accepts repeated names and
values that an option cannot take, and stops at the first unknown option. Here the parser's own
actions check the whole file first, and every error is reported.
"""

import argparse
import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.server.documents import Document, read_json, read_yaml, warn_if_exposed
from shoal.server.errors import UserError, one_line, shown_name

_READERS = {".yaml": read_yaml, ".yml": read_yaml, ".json": read_json}
_NOT_IN_A_FILE = ("config", "help")
_SECRETS = frozenset({"api_key", "hf_token"})
"""Options whose values are secret."""


class _Option(NamedTuple):
    """An option that a file or a command line names."""

    action: argparse.Action
    flag: str
    """The option's name for the parser, with the part: ``--compilation-config.mode``."""
    part: str
    """The part of its value that is set (``mode``); empty: the whole value."""


def named_model(argv: Sequence[str]) -> str | None:
    """Return the model that a file of options names, without a parser.

    Raises:
        UserError: the file cannot be read, or does not hold options.
    """
    path, _ = _split(argv)
    model = None if path is None else _read(path).content.get("model")
    return model if isinstance(model, str) else None


def warn_of_secrets(argv: Sequence[str]) -> None:
    """Log a warning if a file of options has secrets, and every user can read it."""
    path, _ = _split(argv)
    if path is not None and _SECRETS & {str(k).replace("-", "_") for k in _read(path).content}:
        warn_if_exposed(path, "secrets")


def expand(parser: ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return arguments with the options of a file in place of ``--config FILE``.

    An option of the file is left out if the command line gives it, too; different parts of an
    option (``--hf-overrides.a``) add up. The file's options come first, but after a model at the
    beginning of the command line.

    Args:
        parser: knows all options.
        argv: the arguments of ``shoal serve``.

    Raises:
        UserError: the file is not valid; the message has one line for each wrong option.
    """
    path, words = _split(argv)
    if path is None:
        return words
    given = [option for word in words if (option := _option(parser, word)) is not None]
    content, problems = _read(path)
    taken: list[_Option] = []
    added: list[str] = []
    for name, value in content.items():
        try:
            option = _named(parser, name, taken)
            arguments = _arguments(parser, option, value)
        except ValueError as error:
            problems.append(f"{shown_name(name)}: {error}")
        else:
            if not any(_overlap(option, other) for other in given):
                added += arguments
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    first = 1 if words and not words[0].startswith("-") else 0
    return [*words[:first], *added, *words[first:]]


def _split(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the file that ``--config`` names, and the other arguments."""
    files: list[str] = []
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--config":
            files.append(value if equals else next(rest, ""))
        else:
            words.append(word)
    if len(files) > 1 or "" in files:
        raise UserError("--config: it takes one file")
    return (Path(files[0]) if files else None), words


def _read(path: Path) -> Document:
    """Return the options of a file, by name.

    Raises:
        UserError: the file cannot be read, or holds something else; one line.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise UserError(f"{path}: a file of options ends in {', '.join(_READERS)}")
    document = reader(path)
    if not isinstance(document.content, dict | None):
        raise UserError(f"{path}: it must be a mapping from options to their values")
    return document._replace(content=document.content or {})


def _option(parser: ArgumentParser, word: str) -> _Option | None:
    """Return the option that a word of a command line names."""
    head, dot, part = word.partition("=")[0].partition(".")
    head = head.replace("_", "-")
    action = parser._option_string_actions.get(head)
    return None if action is None else _Option(action, head + dot + part, part)


def _overlap(one: _Option, other: _Option) -> bool:
    """Return whether only one of two options can have an effect."""
    return one.action is other.action and not (one.part and other.part and one.part != other.part)


def _named(parser: ArgumentParser, name: Any, taken: list[_Option]) -> _Option:
    """Return the option that a file gives under this name, and add it to ``taken``.

    Raises:
        ValueError: there is no such option, or the file has already set it.
    """
    option = _option(parser, f"--{name}")
    if option is None:
        raise ValueError("there is no such option")
    if option.action.dest in _NOT_IN_A_FILE:
        raise ValueError("it has no place in a file")
    for other in taken:
        if _overlap(option, other):
            raise ValueError(f"{other.flag.removeprefix('--')} sets the same")
    taken.append(option)
    return option


def _arguments(parser: ArgumentParser, option: _Option, value: Any) -> list[str]:
    """Return an option and its value as arguments for the parser.

    Raises:
        ValueError: the option cannot have this value; the message says why.
    """
    action, flag, part = option
    if part:
        if not part.endswith("+"):  # which adds to a list
            _convert(parser, action, _nested(part.split("."), value))
        return [f"{flag}={value if isinstance(value, str) else json.dumps(value, default=str)}"]
    if isinstance(value, bool):
        if action.nargs not in (0, "?"):
            raise ValueError("it takes a value; a word such as off stands in quotes")
        negative = flag.replace("--", "--no-", 1)
        return [flag] if value else [negative] if negative in action.option_strings else []
    if action.nargs == 0:
        raise ValueError("it must be true or false")
    if not isinstance(value, list):
        return [f"{flag}={_convert(parser, action, value)}"]
    if action.nargs in ("+", "*"):
        texts = [_convert(parser, action, each) for each in value]
        return [flag, *texts] if texts else []
    try:
        return [f"{flag}={_convert(parser, action, value)}"]
    except ValueError:
        if len(value) != 1:
            raise
        return _arguments(parser, option, value[0])


def _nested(names: Sequence[str], value: Any) -> Any:
    return value if not names else {names[0]: _nested(names[1:], value)}


def _convert(parser: ArgumentParser, action: argparse.Action, value: Any) -> str:
    """Return a value as text that the parser can convert to a value of the option.

    Raises:
        ValueError: the parser cannot convert it.
    """
    is_json = isinstance(value, dict | list)
    text = json.dumps(value, default=str) if is_json else str(value)
    try:
        converted = parser._get_value(action, text)
        parser._check_value(action, converted)
    except argparse.ArgumentError as error:
        raise ValueError(_reason(error)) from None
    if is_json and isinstance(converted, str):
        raise ValueError("it takes one value")
    return text


def _reason(error: argparse.ArgumentError) -> str:
    """Return why an option cannot have its value; for vLLM's configurations, the first reason."""
    cause: BaseException | None = error
    while cause is not None and not hasattr(cause, "errors"):  # as one_line, without pydantic
        cause = cause.__context__
    return error.message if cause is None else one_line(cause)
