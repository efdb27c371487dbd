"""Addresses, slots and routes of Redis: what a URL means, and who is asked for a key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from shapes import Invalid
from workers.config import RedisConfig
from workers.redis_servers import Address, Route, slot_of


@given(st.one_of(st.text(), st.binary(), st.from_regex(r"[a-z]*\{[a-z{}]*\}[a-z{}]*", fullmatch=True)))
def test_slots_are_those_of_the_servers(key: str | bytes) -> None:
    """Hash tags and all: the same as redis-py computes."""
    assert slot_of(key) == key_slot(key.encode() if isinstance(key, str) else key)


@pytest.mark.parametrize(
    ("url", "servers", "cluster"),
    [
        ("redis://h:1/2", ("redis://h:1/2",), False),
        ("unix:///a/b", ("unix:///a/b",), False),
        ("redis+cluster://h", ("redis://h:6379",), True),
        ("redis+cluster://u:p%40@h:1,i:2", ("redis://u:p%40@h:1", "redis://u:p%40@i:2"), True),
        ("rediss+cluster://[::1]:7,h/0?ssl_cert_reqs=none",
         ("rediss://[::1]:7?ssl_cert_reqs=none", "rediss://h:6379?ssl_cert_reqs=none"), True),
    ],
)  # fmt: skip
def test_an_address_is_read(url: str, servers: tuple[str, ...], cluster: bool) -> None:
    """Login and options hold for every node, also for those that are met later."""
    address = Address.of(url)
    assert (address.servers, address.cluster) == (servers, cluster)
    if cluster:
        assert address.node("n", 9) == servers[0].replace(
            servers[0].split("@")[-1].split("//")[-1].split("?")[0], "n:9"
        )


@pytest.mark.parametrize(
    "url",
    ["", "h:1", "http://h:1", "unix+cluster:///a", "redis+cluster://", "redis+cluster://h:0", "redis+cluster://h:x",
     "redis+cluster://h:1,", "redis+cluster://u:hunter2@h:1/3"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """When the configuration is read, and without repeating a password."""
    with pytest.raises(ValueError, match=r"expected embedded|HOST:PORT|database 0") as caught:
        Address.of(url)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(Invalid):
        RedisConfig(url=url)


def test_a_route_knows_what_it_was_told() -> None:
    """Ranges, gaps, moves, a node that does not know its own name; a doubt forgets owners, not addresses."""
    route = Route(Address.of("redis+cluster://s:1"))
    assert (route.known, route.owner(5), route.someone()) == (False, None, "redis://s:1")
    route.learn([[10, 20, [b"b", 2, b"id"]], [0, 5, [b"", 3, b"id"], [b"replica", 9]]], told_by="redis://s:1")
    assert [route.owner(slot) for slot in (0, 5, 6, 10, 20, 21)] == [
        "redis://s:3", "redis://s:3", None, "redis://b:2", "redis://b:2", None,
    ]  # fmt: skip
    route.moved(5, "c", 4, told_by="redis://s:3")
    assert (route.owner(5), route.owner(4)) == ("redis://c:4", "redis://s:3")
    assert set(route.nodes()) == {"redis://s:3", "redis://b:2", "redis://c:4"}
    route.doubt()
    assert (route.known, route.owner(0)) == (False, None)
    assert {route.someone() for _ in range(4)} == {"redis://s:1", "redis://s:3", "redis://b:2", "redis://c:4"}
