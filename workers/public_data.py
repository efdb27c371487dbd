"""MMLU-Redux, ARC, OpenBookQA and C-Eval as items, through `datasets`, which is imported only here.

Read from the branch that the hub keeps of every data set as parquet, `CONFIG/SPLIT/0000.parquet`, or from a copy of
it on this machine. Rows that cannot be asked are left out and counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from workers.errors import LoadFailed
from workers.hub import brief, failures
from workers.items import LETTERS, Chosen, Item, Said, with_letters

BRANCH = "refs/convert/parquet"
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """One row as a question; `right` is the place of the right choice."""

    question: str
    choices: tuple[str, ...]
    right: int


@dataclass(frozen=True, slots=True)
class Source:
    """One data set: where it lies, what of it is asked, and how a row is read."""

    repo: str
    split: str
    """Where none is named. The first that has answers."""
    read: Callable[[Row], Asked | str]
    """The question, or why the row cannot be asked."""
    config: str = ""
    """Empty: all of them, one for each subject."""


def named(text: str) -> tuple[Source, str] | None:
    """`NAME` or `NAME:SPLIT` -> the data set and the split; None where no data set is called so."""
    name, _, split = text.partition(":")
    source = SOURCES.get(name)
    return None if source is None else (source, split or source.split)


def load_public(source: Source, split: str, copy: Path | None = None) -> Chosen:
    """All rows of a split; `copy` is a folder that holds the parquet branch. Raises LoadFailed: `datasets` is not
    installed, the hub cannot be reached, or there is no such split.
    """
    library = _library()
    place = _Folder(copy) if copy is not None else _Hub(source.repo, library)
    items: list[Item] = []
    left_out: Counter[str] = Counter()
    for subject, rows in _rows(place, _files(place, source, split)):
        for row in rows:
            try:
                asked = _clear(source.read(row))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise LoadFailed(f"{place.origin}: {subject} holds rows of another form ({error!r})") from error
            if isinstance(asked, str):
                left_out[asked] += 1
            else:
                items.append(_item(asked, subject))
    if not items:
        why = "; ".join(left_out) or "it holds no row"
        raise LoadFailed(f"{split} of {place.origin}: nothing can be asked: {why}")
    counts = (f"{count} of its rows were left out: {why}." for why, count in sorted(left_out.items()))
    # A report goes out with its pair, and where a copy lies is nobody's business.
    origin = place.origin if copy is None else f"a copy of {source.repo}"
    return Chosen(items, (f"The items are {split} of {origin}.", *counts))


def _clear(asked: Asked | str) -> Asked | str:
    """The question where one letter is right, else why it cannot be asked."""
    if isinstance(asked, str):
        return asked
    texts = [text.strip() if isinstance(text, str) else "" for text in (asked.question, *asked.choices)]
    if not all(texts):
        return "a text is missing"
    choices = texts[1:]
    if not 2 <= len(choices) <= len(LETTERS):
        return f"not 2 to {len(LETTERS)} choices"
    if len(set(choices)) < len(choices):
        return "two of the choices are alike"
    return asked if 0 <= asked.right < len(choices) else "the answer is none of the choices"


def _item(asked: Asked, subject: str) -> Item:
    question = with_letters(asked.question, asked.choices)
    return Item((Said("user", question),), (LETTERS[asked.right],), asked.choices, kind=subject)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise LoadFailed("public data sets need `datasets`: pip install 'twolane-router[datasets]'") from error
    datasets.disable_progress_bars()
    return datasets


def _files(place: _Folder | _Hub, source: Source, split: str) -> dict[str, list[str]]:
    """Parquet files by config. Raises LoadFailed."""
    found: dict[str, list[str]] = {}
    splits: set[str] = set()
    for name in place.names():
        path = PurePosixPath(name)
        if path.suffix != ".parquet" or len(path.parts) != 3 or source.config not in ("", path.parts[0]):
            continue
        splits.add(path.parts[1])
        if path.parts[1] == split:
            found.setdefault(path.parts[0], []).append(name)
    if not found:
        there = f"there are: {', '.join(sorted(splits))}" if splits else "no file there is CONFIG/SPLIT/....parquet"
        raise LoadFailed(
            f"{place.origin}: no split {split!r}{f' of {source.config}' if source.config else ''}; {there}"
        )
    return {config: sorted(found[config]) for config in sorted(found)}


def _rows(place: _Folder | _Hub, by_subject: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Sequence[Row]]]:
    """All subjects in one load: on a hub each would cost some ten requests. Their names may be none that a split can
    have, so numbers stand for them.
    """
    loaded = place.load({f"s{number}": files for number, files in enumerate(by_subject.values())})
    return ((subject, loaded[f"s{number}"]) for number, subject in enumerate(by_subject))


class _Folder:
    """A copy of the parquet branch on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.origin = str(folder)

    def names(self) -> Sequence[str]:
        return [file.relative_to(self._folder).as_posix() for file in self._folder.glob("*/*/*.parquet")]

    def load(self, files: Mapping[str, Sequence[str]]) -> dict[str, Sequence[Row]]:
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError

        paths = {key: [str(self._folder / name) for name in names] for key, names in files.items()}
        try:
            # A stream: nothing of it is copied into a cache.
            streams = load_dataset("parquet", data_files=paths, streaming=True)
            return {key: list(stream) for key, stream in streams.items()}
        except (OSError, ValueError, DatasetGenerationError) as error:
            raise LoadFailed(f"{self.origin}: cannot be read ({brief(error)})") from error


class _Hub:
    """The branch as the hub has it now: one commit for all files."""

    def __init__(self, repo: str, library: Any) -> None:
        from huggingface_hub import HfApi

        self._repo = repo
        try:
            info = HfApi(library_name="datasets", library_version=library.__version__).dataset_info(
                repo, revision=BRANCH, timeout=30
            )
        except failures() as error:
            raise _far(repo, error) from error
        self._commit, self._names = str(info.sha), [file.rfilename for file in info.siblings or []]
        self.origin = f"{repo} at {self._commit[:12]}"

    def names(self) -> Sequence[str]:
        return self._names

    def load(self, files: Mapping[str, Sequence[str]]) -> dict[str, Sequence[Row]]:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError

        try:
            loaded = load_dataset(self._repo, data_files=files, revision=self._commit)
            return {key: list(rows) for key, rows in loaded.items()}
        except (*failures(), DatasetsError) as error:
            raise _far(self._repo, error) from error


def _far(repo: str, error: Exception) -> LoadFailed:
    return LoadFailed(
        f"{repo}: cannot be had from the hub ({brief(error)}); where it cannot be reached, --data-from takes a folder "
        f"that holds its branch {BRANCH}"
    )


def _labelled(question: str) -> Callable[[Row], Asked | str]:
    """ARC and OpenBookQA: `choices` holds texts and labels side by side, and `answerKey` is a label."""

    def read(row: Row) -> Asked | str:
        labels, texts = row["choices"]["label"], row["choices"]["text"]
        if row["answerKey"] not in labels:
            return "no answer"
        return Asked(row[question], tuple(texts), labels.index(row["answerKey"]))

    return read


def _redux(row: Row) -> Asked | str:
    """Its annotators found some of the answers wrong, and wrote down the right one where there is one: its letter, its
    place from 0, or the choice itself.
    """
    choices, kind = tuple(row["choices"]), row["error_type"]
    if kind == "ok":
        return Asked(row["question"], choices, int(row["answer"]))
    if kind != "wrong_groundtruth":
        return f"its annotators say {kind}"
    said = str(row["correct_answer"] or "").strip()
    meant = {i for i, choice in enumerate(choices) if said in (LETTERS[i], str(i), choice.strip())}
    if len(meant) != 1:
        return "its annotators say wrong_groundtruth, and not which choice is right"
    return Asked(row["question"], choices, meant.pop())


def _ceval(row: Row) -> Asked | str:
    """The answers of its test split are not given out."""
    letters = ("A", "B", "C", "D")
    if row["answer"] not in letters:
        return "no answer"
    return Asked(row["question"], tuple(row[letter] for letter in letters), letters.index(row["answer"]))


SOURCES = {
    "arc-challenge": Source("allenai/ai2_arc", "test", _labelled("question"), "ARC-Challenge"),
    "arc-easy": Source("allenai/ai2_arc", "test", _labelled("question"), "ARC-Easy"),
    "c-eval": Source("ceval/ceval-exam", "val", _ceval),
    "mmlu-redux": Source("edinburgh-dawg/mmlu-redux-2.0", "test", _redux),
    "openbookqa": Source("allenai/openbookqa", "test", _labelled("question_stem"), "main"),
}
"""By the name that `--data` takes."""
