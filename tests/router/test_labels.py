"""Use cases, labels and own rules through the HTTP door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.gateway import KEY, Router, Upstream, deployment, router, upstream

LABELS = {"data": {"personal": {"models": ["inside"]}, "public": {}}}
HERE = "tests.router.classifiers"


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def config(up: Upstream, **tenant: Any) -> dict[str, Any]:
    return {
        "model_list": [deployment("inside", up), deployment("outside", up)],
        "tenants": [{"name": "a", "key": KEY, **tenant}],
    }


async def code(asked: Router, model: str = "outside", key: str = KEY, **body: Any) -> str:
    """`ok`, or the error's code."""
    answer = await asked.post(key=key, model=model, **body)
    return "ok" if answer.status == 200 else str(answer.error["code"])


def says(header: str) -> dict[str, Any]:
    return {"headers": {"x-twolane-labels": header}}


async def test_labels_of_the_caller(tmp_path: Path, up: Upstream) -> None:
    """Header and tags label a request; without a label, or with two that differ, the strictest holds."""
    async with router(tmp_path, config(up, labels=LABELS)) as asked:
        assert await code(asked) == "label_not_allowed"
        assert await code(asked, "inside") == "ok"
        assert await code(asked, **says("public")) == "ok"
        assert await code(asked, **says(" data=public ,")) == "ok"
        assert await code(asked, **says("data=personal")) == "label_not_allowed"
        assert await code(asked, metadata={"tags": ["team-7", "public"]}) == "ok"
        assert await code(asked, metadata={"tags": ["team-7"]}) == "label_not_allowed"
        assert await code(asked, metadata={"tags": ["public"]}, **says("personal")) == "label_not_allowed"
        assert await code(asked, metadata={"tags": "public"}) == "label_not_allowed"
        for wrong in ("secret", "topic=public", "public=data"):
            answer = await asked.post(model="outside", **says(wrong))
            assert (answer.status, answer.error["param"]) == (400, "x-twolane-labels")
            assert "data=personal" in answer.error["message"]


async def test_no_labels_asked_for(tmp_path: Path, up: Upstream) -> None:
    """Where policy asks for no labels, the header and the tags are passed by."""
    async with router(tmp_path, config(up)) as asked:
        assert await code(asked, metadata={"tags": ["public"]}, **says("anything")) == "ok"


@pytest.mark.parametrize("name", ["Marked", "Threaded"])
async def test_classifier(tmp_path: Path, up: Upstream, name: str) -> None:
    """What a classifier finds holds; the caller can narrow it and cannot widen it."""
    written = config(up, labels=LABELS, classifier={"use": f"{HERE}:{name}"})
    kim = [{"role": "user", "content": "who is kim?"}]
    async with router(tmp_path, written) as asked:
        assert await code(asked) == "ok"
        assert await code(asked, **says("personal")) == "label_not_allowed"
        assert await code(asked, messages=kim) == "label_not_allowed"
        assert await code(asked, messages=kim, **says("public")) == "label_not_allowed"
        assert await code(asked, "inside", messages=kim) == "ok"
        decided = await asked.post("/v1/decide", model="outside", messages=kim)
        assert decided.json["facts"]["labels"] == {"data": "personal", "tenant": "a"}


@pytest.mark.parametrize("name", ["Broken", "Odd", "Late"])
async def test_classifier_that_fails(tmp_path: Path, up: Upstream, name: str) -> None:
    """A classifier that raises, answers nonsense or is late leaves the request unlabelled, hence the strictest."""
    written = config(up, labels=LABELS, classifier={"use": f"{HERE}:{name}", "timeout": "50ms"})
    async with router(tmp_path, written) as asked:
        assert await code(asked, **says("public")) == "label_not_allowed"
        assert await code(asked, "inside") == "ok"


async def test_use_cases(tmp_path: Path, up: Upstream) -> None:
    """A key's use case decides what it may do, and stands in the decision; a key without one is refused."""

    def case(id: str, **more: Any) -> dict[str, Any]:
        told = {"owner": "kim", "risk": "low", "approved_by": "lee", "review_by": "2999-01-01"}
        return {"id": id, "keys": [f"sk-{id}"], **told, **more}

    cases = [
        case("letters", models=["inside"]),
        case("search"),
        case("late", review_by="2020-01-01"),
        case("new", approved_by=None),
    ]
    async with router(tmp_path, config(up, use_cases=cases)) as asked:
        assert await code(asked) == "use_case_missing"
        assert await code(asked, "inside", key="sk-letters") == "ok"
        assert await code(asked, key="sk-letters") == "use_case_not_allowed"
        assert await code(asked, key="sk-late") == "use_case_overdue"
        assert await code(asked, key="sk-new") == "use_case_unapproved"
        answer = await asked.post(key="sk-search", model="outside")
        assert answer.status == 200
        seen = await asked.get(f"/v1/decisions/{answer.headers['x-twolane-decision']}", key="sk-search")
        assert seen.json["use_cases"] == ["search"]


async def test_use_case_by_label(tmp_path: Path, up: Upstream) -> None:
    """A request whose key is bound to no use case belongs to that of its label."""
    told = {"owner": "kim", "risk": "low", "approved_by": "lee", "review_by": "2999-01-01"}
    cases = [{"id": "pr", "labels": ["public"], **told}]
    async with router(tmp_path, config(up, use_cases=cases, labels=LABELS)) as asked:
        assert await code(asked, **says("public")) == "ok"
        assert await code(asked, "inside", **says("personal")) == "use_case_missing"
        assert await code(asked, "inside") == "use_case_missing"
