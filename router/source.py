"""Source: a YAML file as data, with the line of every key. Knows nothing of what the keys mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from shapes import Complaint, Invalid

Path_ = tuple[int | str, ...]

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's is ten times as fast; a PyYAML that was built without it has none."""
_ENV = "os.environ/"


class ConfigError(Exception):
    """A configuration that cannot be meant. The message is one line and holds no value from the file."""


@dataclass(frozen=True, slots=True)
class Source:
    """One YAML document. `data` is what it says; `line` finds where."""

    name: str
    data: Any
    root: yaml.Node | None

    def line(self, path: Path_) -> int:
        """Line of the last step of the path that is written in the file, counted from 1."""
        node, line = self.root, 1
        for step in path:
            found = _child(node, step)
            if found is None:
                break
            line, node = found
        return line

    def error(self, path: Path_, problem: str) -> ConfigError:
        """`router.yaml:6: model_list[0].litellm_params (model_name case-1): PROBLEM`."""
        place = dotted(path)
        about = self._entry(path)
        where = f"{place}{about}: " if place else ""
        return ConfigError(f"{self.name}:{self.line(path)}: {where}{problem}")

    def invalid(self, error: Invalid, prefix: Path_ = ()) -> ConfigError:
        """The first of the complaints, in the file's terms."""
        found = [(self._written(prefix + c.loc), complaint(c)) for c in error.complaints]
        first = found[0]
        # Both arms of a union complain; the one that got further in is the one that was meant.
        for other in found[1:]:
            if len(other[0]) > len(first[0]) and other[0][: len(first[0])] == first[0]:
                first = other
        more = len({path for path, _ in found if path != first[0][: len(path)]})
        return self.error(first[0], first[1] + (f" (and {more} more)" if more else ""))

    def _written(self, path: Path_) -> Path_:
        """The path without the steps pydantic adds for the arms of a union."""
        kept: list[int | str] = []
        data = self.data
        for index, step in enumerate(path):
            if _holds(data, step):
                kept.append(step)
                data = data[step]
            elif index == len(path) - 1 and isinstance(data, Mapping) and isinstance(step, str):
                kept.append(step)
        return tuple(kept)

    def _entry(self, path: Path_) -> str:
        """Names the list entry a path leads through, by its `model_name` or `name`."""
        data = self.data
        for step in path:
            if isinstance(data, list) and isinstance(step, int) and step < len(data):
                data = data[step]
                if isinstance(data, Mapping):
                    for key in ("model_name", "name"):
                        if isinstance(data.get(key), str):
                            return f" ({key} {data[key]})"
            elif isinstance(data, Mapping) and step in data:
                data = data[step]
            else:
                break
        return ""


def dotted(path: Path_) -> str:
    """`("model_list", 0, "model_info")` -> `model_list[0].model_info`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def read(text: str, name: str) -> Source:
    """Raises ConfigError naming file and line: not YAML, not a mapping, or a key written twice."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None:
            _refuse_twice(root, name)
        data = loader.construct_document(root) if root is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{name}:{line}: not YAML at line {line}: {_harmless(error.problem)}") from None
    except yaml.YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise ConfigError(f"{name}:{line}: not YAML at line {line}: a character that YAML does not allow") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}:1: not YAML: {type(error).__name__} while reading a value") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{name}:1: expected a mapping of keys, found {kind_of(data)}")
    return Source(name, data, root)


def resolve(source: Source, environ: Mapping[str, str]) -> Source:
    """The same with every `os.environ/NAME` replaced. Raises ConfigError naming variable and entry if one is unset."""

    def walk(value: Any, path: Path_, above: tuple[int, ...]) -> Any:
        if id(value) in above:
            raise source.error(path, "refers to itself")
        if isinstance(value, dict):
            return {k: walk(v, (*path, k), (*above, id(value))) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, (*path, i), (*above, id(value))) for i, v in enumerate(value)]
        if isinstance(value, str) and value.startswith(_ENV):
            name = value.removeprefix(_ENV)
            if name not in environ:
                raise source.error(path, f"environment variable {name} is not set")
            return environ[name]
        return value

    return Source(source.name, walk(source.data, (), ()), source.root)


def strings(data: Any, path: Path_ = ()) -> Iterator[tuple[Path_, str]]:
    """Every string in the data with its path."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from strings(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from strings(value, (*path, index))
    elif isinstance(data, str):
        yield path, data


def kind_of(value: object) -> str:
    """What a value is in YAML's words."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
    return type(value).__name__


def _holds(data: Any, step: int | str) -> bool:
    if isinstance(data, list):
        return isinstance(step, int) and 0 <= step < len(data)
    return isinstance(data, Mapping) and step in data


def _child(node: yaml.Node | None, step: int | str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        # Keys merged in with `<<` stand first; a key written in place is found last and wins, as in the data.
        for key, value in reversed(node.value):
            if isinstance(key, yaml.ScalarNode) and key.value == str(step):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and 0 <= step < len(node.value):
        item = node.value[step]
        return item.start_mark.line + 1, item
    return None


def _refuse_twice(root: yaml.Node, name: str) -> None:
    pending, seen = [root], set[int]()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)
        if isinstance(node, yaml.MappingNode):
            keys = set[str]()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in keys:
                        line = key.start_mark.line + 1
                        raise ConfigError(f"{name}:{line}: the key {key.value!r} is written twice")
                    keys.add(key.value)
                pending.append(value)


def _harmless(problem: str | None) -> str:
    """PyYAML's sentence without names taken from the file, which may be a secret that was not quoted."""
    return re.sub(r"['\"](?!<)[^'\"]{2,}['\"]", "…", problem or "cannot be read")


_EXPECTED = {
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping",
    "model_attributes_type": "expected a mapping",
    "string_type": "expected text",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "missing": "is required, but missing",
}


def complaint(error: Complaint) -> str:
    """One complaint in the file's terms, without its place."""
    if error.type == "extra_forbidden":
        return f"unknown key {error.loc[-1]!r}"
    if error.type in _EXPECTED:
        return _EXPECTED[error.type]
    return error.msg.removeprefix("Value error, ").replace("Input should be", "should be")
