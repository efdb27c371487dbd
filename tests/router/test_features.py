"""What a request needs, what names its conversation, and how decisions and health are kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.call import Call
from router.conversations import Conversations, identity, share
from router.course import Decisions, Past
from router.deployments import Deployment
from router.errors import BadRequest, Refused, TransportError, Unavailable
from router.facts_record import DecisionRecord
from router.features import needs, output_limit, prompt_tokens, turns_before_question
from router.health import Health
from router.tenants import Tenant
from router.wire import read_body
from tests.router.gateway import KEY, deployment, router, upstream


def call(path: str = "/chat/completions", tenant: str = "a", session: str | None = None, **body: object) -> Call:
    return Call(
        id="dec_1",
        tenant=Tenant(tenant),
        path=path,
        model="m",
        fields=read_body(msgspec.json.encode(body)),
        stream=False,
        include_usage=False,
        started=0.0,
        session=session,
    )


def says(*contents: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content} for content in contents]


IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (call(messages=says("hi")), set()),
        (call(messages=says('say {"type": "image_url"} and "role": "tool" please', "tool", "file")), set()),
        (call(messages=says("hi"), tools=[], n=1, logprobs=False, tool_choice="none"), set()),
        (call(messages=says("hi"), tools=[{"type": "function"}]), {"tools"}),
        (call(messages=[*says("hi"), {"role": "tool", "content": "x"}]), {"tools"}),
        (call(messages=[{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]), {"tools"}),
        (call(messages=says(IMAGE)), {"images"}),
        (call(messages=says([{"type": "input_audio", "input_audio": {}}])), {"audio"}),
        (call(messages=says("hi"), response_format={"type": "json_object"}), {"json"}),
        (call(messages=says("hi"), response_format={"type": "text"}), set()),
        (call(messages=says("hi"), logprobs=True, top_logprobs=2, n=3), {"logprobs", "n"}),
        (call("/embeddings", input="x"), {"embeddings"}),
        (call("/completions", prompt="x"), {"completions"}),
        (call("/responses", input=says(IMAGE)), {"responses", "images"}),
    ],
)
def test_needs(asked: Call, expected: set[str]) -> None:
    """Features are seen in the structure, and not in what a text merely mentions."""
    assert needs(asked) == expected


_WORDS = st.sampled_from(
    [
        "image_url",
        "input_image",
        "input_audio",
        "file",
        "input_file",
        "tool",
        "text",
        "images",
        "tools",
        "user",
        "input_",
    ]
)
_BLANK = st.sampled_from(["", " ", "\n"])


@given(st.lists(st.tuples(st.sampled_from(["type", "role", "name"]), _BLANK, _BLANK, _WORDS), max_size=4))
def test_every_mark_of_the_messages_is_seen(members: list[tuple[str, str, str, str]]) -> None:
    """However messages are written, the parts that they name are needs, and nothing else is."""
    written = ",".join(f'{{"{key}"{before}:{after}"{word}"}}' for key, before, after, word in members)
    asked = replace(call(), fields={"messages": msgspec.Raw(f"[{written}]".encode())})
    kinds = {"image_url": "images", "input_image": "images", "input_audio": "audio", "tool": "tools"}
    kinds |= {"file": "files", "input_file": "files"}
    assert needs(asked) == {kinds[word] for key, _, _, word in members if key != "name" and word in kinds}


def test_sizes() -> None:
    """Tokens come from bytes, the bound from whichever name it is given under."""
    assert prompt_tokens(call(messages=says("x" * 4000))) == pytest.approx(1000, rel=0.05)
    assert output_limit(call(max_completion_tokens=7, max_tokens=9)) == 9
    assert output_limit(call(max_tokens=None)) is None
    with pytest.raises(BadRequest):
        output_limit(call(max_tokens="many"))


DATA = "QUJD/+9a" * 125_000
PICTURE = f"data:image/png;base64,{DATA}"


@pytest.mark.parametrize(
    ("parts", "least", "most"),
    [
        ([{"type": "image_url", "image_url": {"url": PICTURE}}], 1000, 2000),
        ([{"type": "image_url", "image_url": {"url": PICTURE}}] * 3, 3000, 6000),
        ([{"type": "input_image", "image_url": PICTURE.replace("/", "\\/")}], 1000, 2000),
        ([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}], 1000, 5000),
        ([{"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}], 1000, 5000),
        ([{"type": "file", "file": {"file_data": f"data:application/pdf;base64,{DATA}"}}], 1000, 5000),
        ([{"type": "text", "text": f"what is ;base64, {'of words ' * 100_000}"}], 200_000, 250_000),
        ([{"type": "text", "text": 'a \\" b ;base64,' * 50_000}], 150_000, 300_000),
    ],
)
def test_what_is_embedded_is_not_counted_as_text(parts: list[dict[str, object]], least: int, most: int) -> None:
    """A picture, sound or file within the body counts as what it costs to be read, not by its letters."""
    assert least < prompt_tokens(call(messages=says(parts))) < most


async def test_a_picture_fits_a_limit_of_tokens(tmp_path: Path) -> None:
    """A tenant with a limit of tokens and a small budget may send a photograph."""
    tenant = {"name": "a", "key": KEY, "tpm_limit": 5000, "max_budget": 0.01}
    async with upstream() as up:
        config = {"model_list": [deployment("m", up, input_cost_per_token=1e-6)], "tenants": [tenant]}
        async with router(tmp_path, config) as door:
            content = [{"type": "image_url", "image_url": {"url": PICTURE}}]
            got = await door.post(model="m", messages=[{"role": "user", "content": content}])
    assert got.status == 200


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (says("q"), False),
        ([{"role": "system", "content": "s"}, *says("q")], True),
        (says("a", "q"), True),
        ("no list", False),
        ([], False),
    ],
)
def test_context_stands_before_the_question(messages: object, expected: bool) -> None:
    """Something before the last user message is context; what cannot be read is none."""
    assert turns_before_question(call(messages=messages)) is expected


def test_conversations_have_one_name() -> None:
    """A session, a cache key or the first turn names a conversation, never across tenants."""
    first, later = call(messages=says("a")), call(messages=says("a", "b", "c"))
    assert identity(first) == identity(later)
    assert identity(first) != identity(call(messages=says("b")))
    assert identity(first) != identity(call(tenant="other", messages=says("a")))
    assert identity(call(session="s", messages=says("a"))) == identity(call(session="s", messages=says("z")))
    assert identity(call(prompt_cache_key="k", messages=says("a"))) == identity(call(prompt_cache_key="k"))
    assert identity(call()) is None
    assert 0 <= (share(identity(first)) or 0) < 1


def test_conversations_are_forgotten_in_order() -> None:
    """The least recently used conversation leaves first."""
    kept = Conversations(most=2)
    for name in (b"a", b"b", b"a", b"c"):
        kept.answered(name, name.decode())
    assert [kept.last(name) for name in (b"a", b"b", b"c", None)] == ["a", None, "c", None]


def test_decisions_are_bounded() -> None:
    """Neither number nor bytes of kept decisions grow past their bounds; the oldest leave."""
    decision = DecisionRecord("m", (), "no_deployments", [], False, ())

    def past(id: str, model: str) -> Past:
        return Past(id, model, "", [(None, decision)])

    kept = Decisions(most=3, most_bytes=1000)
    for i in range(5):
        kept.keep("a", past(f"d{i}", "m"), ())
    assert [kept.find(f"d{i}", "a") is not None for i in range(5)] == [False, False, True, True, True]
    assert kept.find("d4", "b") is None
    kept.keep("a", past("big", "m" * 800), ())
    assert [kept.find(id, "a") is not None for id in ("d3", "d4", "big")] == [False, False, True]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 700)), max_size=60))
def test_kept_decisions_are_the_youngest_and_whole(told: list[tuple[int, int]]) -> None:
    """Of whatever sizes, told again or not: what is found is what was said last, and nothing older than what is not."""
    kept, last = Decisions(most=9, most_bytes=2000), dict[str, int]()
    decision = DecisionRecord("m", (), "no_deployments", [], False, ())
    for number, size in told:
        id = f"d{number}"
        last.pop(id, None)
        last[id] = size
        kept.keep("a", Past(id, "m" * size, "", [(None, decision)]), ())
        found = [kept.find(id, "a") for id in last]
        there = [body is not None for body in found]
        assert there == sorted(there)
        assert there[-1]
        for body, size in zip(found, last.values(), strict=True):
            assert body is None or msgspec.json.decode(body)["model"] == "m" * size


def _health(members: int, now: list[float]) -> tuple[Health, str]:
    entries = [
        Deployment.model_validate({"model_name": "m", "litellm_params": {"model": f"openai/{i}"}})
        for i in range(members)
    ]
    return Health({"m": entries}, allowed_fails=2, cooldown_time=5.0, clock=lambda: now[0]), entries[0].id


@pytest.mark.parametrize(
    ("members", "errors", "rests"),
    [
        (2, [Unavailable("x")], False),
        (2, [Unavailable("x")] * 2, True),
        (1, [Unavailable("x")] * 9, False),
        (2, [Refused("x")] * 9, False),
        (2, [Unavailable("x", code="overloaded")] * 9, False),
        (2, [TransportError("x", status=429, headers={"retry-after": "3"})], True),
        (2, [TransportError("x", status=429)], False),
    ],
)
def test_rest(members: int, errors: list[TransportError], rests: bool) -> None:
    """Failures in a row bring a rest, the caller's mistakes and full queues never, nor the only one of its group."""
    now = [0.0]
    health, id = _health(members, now)
    told = [health.failed(id, error) for error in errors]
    assert (told[-1], health.cooling(id)) == (rests, rests)
    now[0] = 6.0
    assert not health.cooling(id)


def test_success_forgets_failures() -> None:
    """One success between two failures and they are not in a row."""
    health, id = _health(2, [0.0])
    health.failed(id, Unavailable("x"))
    health.succeeded(id)
    health.failed(id, Unavailable("x"))
    assert not health.cooling(id)
