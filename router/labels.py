"""Labels of a request: what its caller says of it, and what a classifier of the tenant's finds in it.

A caller's label can only narrow what a classifier found: where they differ, both hold. What a classifier leaves out,
fails to answer or answers too late is missing, whatever the caller says, and a missing label counts as the strictest.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

import msgspec
import structlog

from policies.hooks import Hook
from policies.scopes import Scope
from router.call import Call
from router.errors import BadRequest
from workers.config import Span

log = structlog.get_logger("twolane.router")

_HEADER = "x-twolane-labels"
_THREADS = 4
"""Classifiers that are not async wait in so many threads at a time; those in excess count against their time."""

Body = Mapping[str, Any]
"""A request's body as JSON."""


class LabelsRequests(Protocol):
    """What the class behind a classifier's `use` offers."""

    def classify(self, body: Body) -> Mapping[str, str] | Awaitable[Mapping[str, str]]:
        """Values by label. Async, or called in a thread."""


class Classifier(Hook):
    """`classifier` of a tenant: a class that labels requests."""

    verb: ClassVar[str] = "classify"
    may_wait: ClassVar[bool] = True

    timeout: Span = 0.5
    """Seconds that a request may wait for it."""

    @property
    def made(self) -> LabelsRequests:
        """The instance; made when the file was read."""
        made: LabelsRequests = self._made
        return made


class _Metadata(msgspec.Struct):
    tags: list[str] = []


_metadata = msgspec.json.Decoder(_Metadata)


class Labeller:
    """Labels the requests of one tenant."""

    def __init__(self, labels: Mapping[str, Mapping[str, Scope]], classifier: Classifier | None) -> None:
        self._values = {label: frozenset(values) for label, values in labels.items()}
        self._label_of = {value: label for label, values in labels.items() for value in values}
        self._classifier = classifier
        self._threads: ThreadPoolExecutor | None = None
        if classifier is not None and not inspect.iscoroutinefunction(classifier.made.classify):
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="classifier")

    async def labels(self, call: Call) -> dict[str, str]:
        """Values by label, those of sources that differ joined by commas. Raises BadRequest for a header in error."""
        told = self._told(call)
        if self._classifier is None:
            return _joined(told)
        found = await self._found(self._classifier, call)
        # Only what the classifier answered stands: the caller may add to it, not stand in for it.
        return _joined({label: {value, *told.get(label, ())} for label, value in found.items()})

    def told(self, call: Call) -> dict[str, str]:
        """What the caller alone says, read as `labels` reads it."""
        return _joined(self._told(call))

    def _told(self, call: Call) -> dict[str, set[str]]:
        told: dict[str, set[str]] = {}
        for tag in _tags(call):
            if tag in self._label_of:
                told.setdefault(self._label_of[tag], set()).add(tag)
        for entry in _entries(call.told_labels):
            name, _, value = entry.rpartition("=")
            label = self._label_of.get(value.strip())
            if label is None or name.strip() not in ("", label):
                known = ", ".join(f"{label}={value}" for value, label in self._label_of.items())
                raise BadRequest(
                    f"{_HEADER}: {entry!r} is none of: {known}.", param=_HEADER, code="invalid_header"
                ) from None
            told.setdefault(label, set()).add(value.strip())
        return told

    async def _found(self, classifier: Classifier, call: Call) -> dict[str, str]:
        """Known values that the classifier answers in time."""
        try:
            body = msgspec.json.decode(msgspec.json.encode(call.fields))
            async with asyncio.timeout(classifier.timeout):
                answer = await self._ask(classifier.made, body)
            return {label: value for label, value in answer.items() if value in self._values.get(label, ())}
        except Exception as error:  # another's code: whatever it does, the request counts as not labelled
            log.warning("classifier_failed", tenant=call.tenant.name, use=classifier.use, error=type(error).__name__)
            return {}

    async def _ask(self, made: LabelsRequests, body: Body) -> Mapping[str, str]:
        if self._threads is None:
            answer = made.classify(body)
        else:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, made.classify, body)
        return await answer if isinstance(answer, Awaitable) else answer


def _tags(call: Call) -> Iterable[str]:
    """LiteLLM's `metadata.tags`; tags that are no value of a label mean something to others."""
    raw = call.fields.get("metadata")
    if raw is None:
        return ()
    try:
        return _metadata.decode(raw).tags
    except msgspec.DecodeError:
        return ()


def _entries(header: str | None) -> Iterator[str]:
    for entry in (header or "").split(","):
        if entry.strip():
            yield entry.strip()


def _joined(values: Mapping[str, set[str]]) -> dict[str, str]:
    return {label: ",".join(sorted(found)) for label, found in values.items()}
