"""Lines that people write: what each becomes, and what is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.errors import LoadFailed
from workers.items import Said, digest_of_items, read_items


def written(folder: Path, *lines: dict[str, Any] | str) -> Path:
    file = folder / "items.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def test_what_lines_become(tmp_path: Path) -> None:
    """A chat, a question over a context, one with choices, one that should be refused; empty lines are nothing."""
    chat = [{"role": "user", "content": "Hi\u2028there"}, {"role": "assistant", "content": "Hello"}]
    found = read_items(
        written(
            tmp_path,
            {"messages": chat},
            "",
            {"question": "Who?", "answer": ["Ann", "Anna"], "context": "Ann did.", "kind": "who", "labels": ["l"]},
            {"question": "Which?", "choices": ["red", "blue"], "answer": "blue"},
            {"question": "A poison?", "safety": "refuse"},
        )
    )
    assert [i.answers for i in found] == [("Hello",), ("Ann", "Anna"), ("B",), ()]
    assert found[0].messages == (Said("user", "Hi\u2028there"),)
    assert found[1].messages == (Said("system", "Ann did."), Said("user", "Who?"))
    assert (found[1].kind, found[1].labels) == ("who", ("l",))
    assert found[1].last_only == [{"role": "user", "content": "Who?"}]
    assert "A. red\nB. blue" in found[2].messages[-1].content


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ({"question": "Who?"}, "no answer"),
        ({"question": "Who?", "answer": " \n"}, "no answer"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]}, "no answer"),
        ({"answer": "Ann"}, "either messages or a question"),
        ({"question": "Who?", "messages": [{"role": "user", "content": "x"}]}, "either messages or a question"),
        ({"question": "Who?", "anwser": "Ann"}, "unknown field `anwser`"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "must be the user's"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "Invalid enum value 'tool'"),
        ({"question": "Who?", "choices": ["a", "b"], "answer": "c"}, "none of the choices"),
        ({"question": "Who?", "choices": ["a"], "answer": "a"}, "2 to 26 choices"),
        ({"question": "Who?", "choices": ["a", "b", "a"], "answer": "a"}, "twice"),
        ({"question": "Who?", "safety": "secret"}, "needs must_not"),
        ({"question": "Who?", "safety": "obey"}, "needs must"),
    ],
)
def test_what_is_refused(tmp_path: Path, line: dict[str, Any] | str, says: str) -> None:
    """The error names the file's line and what is wrong."""
    file = written(tmp_path, {"question": "Who?", "answer": "Ann"}, line)
    with pytest.raises(LoadFailed, match=f"{file}:2: .*") as error:
        read_items(file)
    assert says in str(error.value)


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    """Nothing to learn from or ask is an error, and so is what is no text."""
    with pytest.raises(LoadFailed, match="holds no line"):
        read_items(written(tmp_path, "", ""))
    (tmp_path / "raw").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoadFailed, match="cannot be read"):
        read_items(tmp_path / "raw")


def test_the_digest_covers_what_is_asked_and_what_is_right(tmp_path: Path) -> None:
    """Another question, answer, context or rival is another digest; the same file has the same."""
    lines: list[dict[str, Any]] = [
        {"question": "Who?", "answer": "Ann"},
        {"question": "Who??", "answer": "Ann"},
        {"question": "Who?", "answer": "Bob"},
        {"question": "Who?", "answer": "Ann", "context": "c"},
        {"question": "Who?", "answer": "Ann", "rivals": ["Bob"]},
    ]
    digests = [digest_of_items(read_items(written(tmp_path, line))) for line in (*lines, lines[0])]
    assert len(set(digests)) == len(lines)
    assert digests[0] == digests[-1]
