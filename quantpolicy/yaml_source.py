"""Read one YAML file into plain values with a line number for every path. No schema here.

What an unquoted scalar means is told in ``yaml_scalar``. Refused are duplicate keys, keys that are
not text, tags, aliases, several documents and an empty file. A byte-order mark is accepted; the
encoding is UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, TypeAlias

import yaml

from quantpolicy.errors import RuleTableError
from quantpolicy.yaml_scalar import Scalar, ScalarError, is_bare_word, read_scalar

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
YamlPath: TypeAlias = tuple[str | int, ...]
_Marks: TypeAlias = "dict[str, tuple[int, _Marks]] | list[tuple[int, _Marks]] | None"

LOADER: type[yaml.SafeLoader] | type[yaml.CSafeLoader] = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)

MAX_DEPTH = 64


class YamlSource:
    """The values of one YAML file, and where each of them stands.

    Args:
        name: the file as messages name it.
        values: the root mapping.
        marks: (line, marks of what is inside) for every key and item, parallel to the values.
        bare_words: (path, word) of every unquoted yes, no, on, off, y or n that is a value.
    """

    __slots__ = ("_marks", "bare_words", "name", "values")

    def __init__(
        self,
        name: str,
        values: dict[str, Plain],
        marks: _Marks,
        bare_words: tuple[tuple[YamlPath, str], ...],
    ) -> None:
        self.name = name
        self.values = values
        self.bare_words = bare_words
        self._marks = marks

    def line(self, path: YamlPath) -> int:
        """Return the 1-based line of a key or item; of its nearest parent where it is absent."""
        line, marks = 1, self._marks
        for part in path:
            if isinstance(marks, dict) and part in marks:
                line, marks = marks[str(part)]
            elif isinstance(marks, list) and isinstance(part, int) and part < len(marks):
                line, marks = marks[part]
            else:
                break
        return line

    def has(self, path: YamlPath) -> bool:
        """Tell whether the file itself gives the path."""
        value: Plain = self.values
        for part in path:
            if isinstance(value, dict) and part in value:
                value = value[str(part)]
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return False
        return True

    def where(self, path: YamlPath) -> str:
        """Return ``file:line path``, as errors name a place."""
        return describe_place(self.name, self.line(path), path)


def describe_place(name: str, line: int, path: YamlPath) -> str:
    """Return ``file:line families.flux.1.rules[2]``; the path is left out when empty."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return " ".join(filter(None, (f"{name}:{line}", "".join(parts).removeprefix("."))))


def read_yaml(path: str | Path, *, name: str = "") -> YamlSource:
    """Read a YAML file whose root is a mapping.

    Args:
        name: the file as messages name it; the path when "".

    Raises:
        RuleTableError: the file cannot be read, or holds what this module or ``yaml_scalar``
            refuses.
    """
    shown = name or str(path)
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RuleTableError(
            shown, f"cannot be read: {reason}", remedy="give the path of a YAML file"
        ) from error
    return parse_yaml(data, name=shown)


def parse_yaml(data: bytes | str, *, name: str) -> YamlSource:
    """Parse the bytes or the text of a YAML file; see ``read_yaml``."""
    text = data.removeprefix("\ufeff") if isinstance(data, str) else _decode(data, name)
    builder = _Builder(name)
    try:
        builder.consume(yaml.parse(text, Loader=LOADER))
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, builder) from error
    return builder.finish()


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RuleTableError(
            f"{name}:{line}",
            f"byte 0x{data[error.start]:02x} is not UTF-8",
            remedy="save the file as UTF-8",
        ) from error


def _syntax_error(error: yaml.YAMLError, text: str, builder: _Builder) -> RuleTableError:
    mark = getattr(error, "problem_mark", None)
    position = getattr(error, "position", 0)
    line = text.count("\n", 0, position) if mark is None else mark.line
    lines = text.split("\n")
    indent = lines[line] if line < len(lines) else ""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
    has_tab = "\t" in indent[: len(indent) - len(indent.lstrip())] or "'\\t'" in problem
    return RuleTableError(
        describe_place(builder.name, line + 1, builder.path()),
        "a tab stands where only spaces may" if has_tab else f"not YAML: {problem}",
        remedy="replace it by spaces" if has_tab else "correct the syntax, or quote the value",
    )


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


class _Frame:
    """A mapping or list that is being filled; ``key`` is the one whose value comes next."""

    __slots__ = ("key", "key_line", "marks", "values")

    def __init__(self, values: dict[str, Plain] | list[Plain], marks: _Marks) -> None:
        self.values = values
        self.marks = marks
        self.key: str | None = None
        self.key_line = 0


class _Builder:
    """Turns parser events into values, without recursion, so depth is ours to limit."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stack: list[_Frame] = []
        self.root: _Frame | None = None
        self.documents = 0
        self.bare_words: list[tuple[YamlPath, str]] = []

    def path(self) -> YamlPath:
        """Return the path of the value that comes next."""
        parts: list[str | int] = []
        for depth, frame in enumerate(self.stack, start=1):
            if isinstance(frame.values, list):
                is_open = depth < len(self.stack)
                parts.append(len(frame.values) - is_open)
            elif frame.key is not None:
                parts.append(frame.key)
        return tuple(parts)

    def fail(self, line: int, found: str, *, allowed: str = "", remedy: str) -> NoReturn:
        raise RuleTableError(
            describe_place(self.name, line, self.path()), found, allowed=allowed, remedy=remedy
        )

    def consume(self, events: Iterable[yaml.Event]) -> None:
        """Take every event of the stream."""
        for event in events:
            if isinstance(event, yaml.ScalarEvent):
                self._scalar(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._close()
            elif isinstance(event, yaml.CollectionStartEvent):
                self._open(event)
            elif isinstance(event, yaml.AliasEvent):
                self.fail(
                    _line(event),
                    f"alias *{event.anchor}",
                    remedy="write the value out, or share rules through a group",
                )
            elif isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    self.fail(
                        _line(event),
                        "a second document starts",
                        remedy="keep one document a file",
                    )

    def finish(self) -> YamlSource:
        """Return the source; the root must have been a mapping."""
        if self.root is None or not isinstance(self.root.values, dict):
            found = "the root is not a mapping" if self.documents else "the file is empty"
            self.fail(1, found, remedy="give a mapping of sections, such as `version: 1`")
        return YamlSource(self.name, self.root.values, self.root.marks, tuple(self.bare_words))

    def _open(self, event: yaml.CollectionStartEvent) -> None:
        line = _line(event)
        if event.tag is not None:
            self._refuse_tag(event.tag, line)
        if self._expects_key():
            self.fail(line, "a key is a list or a mapping", remedy="use text as the key")
        if len(self.stack) >= MAX_DEPTH:
            self.fail(line, f"nested deeper than {MAX_DEPTH} levels", remedy="flatten it")
        frame = _Frame({}, {}) if isinstance(event, yaml.MappingStartEvent) else _Frame([], [])
        if self.stack:
            self._put(frame.values, line, frame.marks)
        else:
            self.root = frame
        self.stack.append(frame)

    def _close(self) -> None:
        self.stack.pop()
        if self.stack:
            self.stack[-1].key = None

    def _expects_key(self) -> bool:
        if not self.stack:
            return False
        frame = self.stack[-1]
        return isinstance(frame.values, dict) and frame.key is None

    def _put(self, value: Plain, line: int, marks: _Marks) -> None:
        frame = self.stack[-1]
        if isinstance(frame.values, list):
            assert isinstance(frame.marks, list)
            frame.values.append(value)
            frame.marks.append((line, marks))
        else:
            assert isinstance(frame.marks, dict)
            assert frame.key is not None
            frame.values[frame.key] = value
            frame.marks[frame.key] = (frame.key_line, marks)

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        text: str = event.value
        line = _line(event)
        if event.tag is not None:
            self._refuse_tag(event.tag, line)
        if not self.stack:
            return
        plain = not event.style
        if self._expects_key():
            self._key(text, plain, line)
            return
        value = self._plain(text, line) if plain else self._checked_text(text, line)
        if plain and is_bare_word(text):
            self.bare_words.append((self.path(), text))
        self._put(value, line, None)
        self.stack[-1].key = None

    def _key(self, text: str, plain: bool, line: int) -> None:
        frame = self.stack[-1]
        assert isinstance(frame.marks, dict)
        if plain and not isinstance(self._plain(text, line), str):
            self.fail(line, f"key {text!r} is not text", remedy=f'quote it: "{text}"')
        if text in frame.marks:
            self.fail(
                line,
                f"key {self._checked_text(text, line)!r} is already given in line"
                f" {frame.marks[text][0]}",
                remedy="keep one of the two",
            )
        frame.key, frame.key_line = self._checked_text(text, line), line

    def _refuse_tag(self, tag: str, line: int) -> NoReturn:
        self.fail(line, f"tag {tag!r}", remedy="remove it, or quote the value to make it text")

    def _checked_text(self, text: str, line: int) -> str:
        """Return the text; the pure-Python parser lets escapes of lone surrogates through."""
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            self.fail(line, "a lone surrogate, which is no character", remedy="remove the escape")
        return text

    def _plain(self, text: str, line: int) -> Scalar:
        """Return the value of an unquoted scalar."""
        try:
            return read_scalar(text)
        except ScalarError as error:
            self.fail(line, error.found, allowed=error.allowed, remedy=error.remedy)
