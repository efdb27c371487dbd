"""The books of finished requests: closed many at a time, and none of them lost or counted twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from router.audit_verify import records
from router.books import Books
from router.call import Reply, Usage
from router.course import Course, Decisions
from router.estimates import Estimates
from router.telemetry import Metrics, configure_logging
from tests.router.audit_writer import call, tenant
from tests.router.gateway import deployment, router, upstream
from tests.router.test_telemetry import logs as logs


def course(id: str) -> Course:
    reply = Reply(200, "application/json", b"{}", usage=Usage(3, 2, known=True))
    made = Course(call(id, tenant("lab", regulated=False)), reply=reply, deployment="d1", transport="text")
    made.ends("ok", None)
    return made


def books() -> tuple[Books, Metrics, Estimates]:
    metrics, estimates = Metrics([("d1", "assistant", "text")], ["lab"]), Estimates()
    return Books(metrics=metrics, estimates=estimates, decisions=Decisions(), audit=None), metrics, estimates


def counted(page: bytes) -> int:
    lines = [line for line in page.decode().splitlines() if line.startswith("twolane_requests_total{")]
    return sum(int(line.rpartition(" ")[2]) for line in lines)


async def test_every_request_is_in_every_book_once(tmp_path: Path, logs: Any) -> None:
    """Of requests that end together each is counted, logged, remembered and recorded once, when it can be read."""
    async with upstream() as up, router(tmp_path, {"model_list": [deployment("m", up)]}) as door:
        configure_logging("info", format="json", stream=logs)
        told = await asyncio.gather(*(door.post(model="m") for _ in range(75)), door.post(model="m", key="wrong"))
        ids = [answer.headers["x-twolane-decision"] for answer in told]
        assert counted((await door.get("/metrics")).raw) == 76
        for id in ids[:75]:
            assert (await door.get(f"/v1/decisions/{id}")).json["happened"]["request_id"] == id
        assert (await door.get(f"/v1/decisions/{ids[75]}")).status == 404
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    assert sorted(line["request_id"] for line in lines if line["event"] == "request") == sorted(ids)
    outcomes = [r.body for r in records(tmp_path / "audit", "a") if r.body["kind"] == "outcome"]
    assert sorted(body["id"] for body in outcomes) == sorted(ids[:75])
    assert [body["ts"] for body in outcomes] == sorted(body["ts"] for body in outcomes)


async def test_a_call_that_cannot_be_closed_takes_no_other_along(logs: Any) -> None:
    """What fails for one request is logged with its name, and those that end with it are counted all the same."""
    configure_logging("info", format="json", stream=logs)
    kept, metrics, _ = books()
    broken = course("dec_2")
    broken.reply = cast(Any, object())
    for one in (course("dec_1"), broken, course("dec_3")):
        kept.add(one, None)
    assert counted(metrics.render()) == 2
    lines = [json.loads(line) for line in logs.getvalue().splitlines()]
    assert [(line["event"], line["request_id"]) for line in lines] == [
        ("books_failed", "dec_2"),
        ("request", "dec_1"),
        ("request", "dec_3"),
    ]


@pytest.mark.parametrize(("ended", "taught"), [(1, 1), (4, 4), (5, 3), (64, 4)])
async def test_a_few_of_many_answers_teach(ended: int, taught: int, logs: Any) -> None:
    """An estimate learns from every answer that ends alone, and from a few, spread evenly, of many that end at once."""
    configure_logging("error", format="json", stream=logs)
    kept, _, estimates = books()
    for n in range(ended):
        kept.add(course(f"dec_{n}"), None)
    kept.flush()
    told = estimates.predict("d1", prompt_tokens=3, output_tokens=2)
    assert told is not None
    assert told.samples == taught
