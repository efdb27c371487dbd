"""Names of KV: what must change them does, and what they are made of stays private."""

from __future__ import annotations

import multiprocessing
import os
import resource
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.keys import Keyring, Scope, Space, chain

PARTS = {
    "model": "m",
    "revision": "r1",
    "weights": "w",
    "dtype": "float32",
    "tokenizer": "t",
    "template": "c",
    "fuser": "f",
    "gates": "0110",
    "adapter": "l",
    "attention": "sdpa",
}
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=64)
RING = Keyring(None)
SCOPE = RING.scope("a")
SPACE = Space("plain", PARTS)


@given(TOKENS, st.data())
def test_any_other_token_changes_its_block_and_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    """Blocks before a changed token keep their ids; its own and all later ones differ."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**32 - 1).filter(lambda t: t != tokens[at]))
    before = chain(SCOPE, SPACE, tokens, 4)
    after = chain(SCOPE, SPACE, [*tokens[:at], other, *tokens[at + 1 :]], 4)
    for n, (old, new) in enumerate(zip(before, after, strict=True)):
        assert (old == new) == (n < at // 4)


@given(TOKENS, TOKENS)
def test_equal_prefixes_have_equal_ids(left: list[int], right: list[int]) -> None:
    """Two chains share exactly the ids of the whole blocks of their common prefix."""
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    ids = zip(chain(SCOPE, SPACE, left, 4), chain(SCOPE, SPACE, right, 4), strict=False)
    assert sum(a == b for a, b in ids) == common // 4


@given(st.lists(st.integers(0, 50), max_size=11), st.lists(st.integers(0, 50), max_size=11))
def test_a_tail_names_all_tokens_and_nothing_else(left: list[int], right: list[int]) -> None:
    """With tails two texts end in the same id only when they are equal; without, the tail adds to the whole blocks."""
    ids, others = (chain(SCOPE, SPACE, tokens, 4, tail=True) for tokens in (left, right))
    assert ids[: len(left) // 4] == chain(SCOPE, SPACE, left, 4)
    assert len(ids) == -(-len(left) // 4)
    assert (ids[-1:] == others[-1:]) == (left == right)


@given(st.integers(0, 2**32 - 1))
def test_position_is_part_of_the_key(token: int) -> None:
    """The same block of tokens has another id at every position."""
    ids = chain(SCOPE, SPACE, [token] * 64, 4)
    assert len(set(ids)) == len(ids) == 16


@given(TOKENS, st.dictionaries(st.sampled_from(sorted(PARTS)), st.text(), min_size=1), st.sampled_from("ab"))
def test_any_change_of_a_part_or_tenant_changes_every_id(
    tokens: list[int], change: dict[str, str], tenant: str
) -> None:
    """Model, revision, dtype, adapter, template, fuser, gates, tenant ... alone or together: no id is shared."""
    other = Space("plain", {**PARTS, **change})
    differs = tenant != "a" or any(PARTS[part] != value for part, value in change.items())
    ids, others = chain(SCOPE, SPACE, tokens, 4), chain(RING.scope(tenant), other, tokens, 4)
    assert set(ids).isdisjoint(others) if differs else ids == others


@pytest.mark.parametrize(
    "other",
    [
        Space("fused", PARTS),
        Space("plain", {k: v for k, v in PARTS.items() if k != "gates"}),
        Space("plain", {**PARTS, "revision": None}),
        Space("plain", {**PARTS, "gates": 110}),
    ],
)
def test_kind_absence_and_type_change_the_key(other: Space) -> None:
    """What is missing, null or a number is not what is a string."""
    assert other.digest != SPACE.digest


def test_order_of_parts_does_not_matter() -> None:
    """The digest is over canonical JSON."""
    assert Space("plain", dict(reversed(PARTS.items()))).digest == SPACE.digest


@pytest.mark.parametrize("part", [object(), b"bytes", float("nan"), {1, 2}])
def test_parts_that_json_cannot_name_are_refused(part: object) -> None:
    """A part whose text is not exact raises instead of colliding."""
    with pytest.raises((TypeError, ValueError)):
        Space("plain", {"x": part})  # type: ignore[dict-item]


def test_tenant_epoch_block_size_and_server_change_the_key(tmp_path: Path) -> None:
    """No two of: another tenant, a later epoch, another block size, another server share an id."""
    ring = Keyring(tmp_path / "one")
    first = ring.scope("a")
    sets = [set(chain(first, SPACE, range(32), 4)), set(chain(ring.scope("b"), SPACE, range(32), 4))]
    sets.append(set(chain(first, SPACE, range(32), 8)))
    ring.step("a")
    sets.append(set(chain(ring.scope("a"), SPACE, range(32), 4)))
    sets.append(set(chain(Keyring(tmp_path / "two").scope("a"), SPACE, range(32), 4)))
    assert len(set().union(*sets)) == sum(map(len, sets))


def test_ids_cannot_be_computed_without_the_key() -> None:
    """The same tokens in the same space have other ids under another chain key."""
    known = Scope("a", 0, SCOPE.tag, bytes(32), SCOPE.seal_key)
    assert not set(chain(known, SPACE, range(32), 4)) & set(chain(SCOPE, SPACE, range(32), 4))


def test_a_scope_shows_no_key_and_no_tenant() -> None:
    """The repr that a log or traceback may print names neither secrets nor tenants."""
    shown = repr(RING.scope("Acme Bank"))
    assert "Acme" not in shown
    assert "key" not in shown


def test_key_files_are_private_and_outlive_the_process(tmp_path: Path) -> None:
    """Mode 0600; a second ring on the same folder derives the same scope."""
    scope = Keyring(tmp_path).scope("a")
    for path in [tmp_path / "server.key", *(tmp_path / "tenants").glob("*.key")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keyring(tmp_path).scope("a") == scope
    assert list(Keyring(tmp_path).live()) == [scope.tag]


def test_a_purge_elsewhere_is_seen_at_once(tmp_path: Path) -> None:
    """Another ring's step ends this ring's scope, without any message."""
    one, two = Keyring(tmp_path), Keyring(tmp_path)
    scope = one.scope("a")
    assert two.current(scope)
    assert two.step("a") == scope
    assert not one.current(scope)
    assert one.scope("a").epoch == 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "empty"])
@pytest.mark.parametrize("which", ["server", "tenant"])
def test_a_damaged_key_is_made_anew(tmp_path: Path, which: str, damage: str) -> None:
    """Nobody fails over a broken key file, and what it protected is not found again."""
    before = Keyring(tmp_path).scope("a")
    path = tmp_path / "server.key" if which == "server" else next((tmp_path / "tenants").glob("*.key"))
    data = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    else:
        data[len(data) * 3 // 4] ^= 0xFF
        path.write_bytes({"truncate": data[: len(data) // 2], "flip": data, "empty": b""}[damage])
    after = Keyring(tmp_path).scope("a")
    assert after.tag != before.tag
    assert Keyring(tmp_path).scope("a") == after


def _tag_of(folder: str) -> str:
    return Keyring(Path(folder)).scope("a").tag


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    """Eight processes that create the keys at the same time all end with the same ones."""
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        tags = pool.map(_tag_of, [os.fspath(tmp_path / "kv")] * 8, chunksize=1)
    assert len(set(tags)) == 1


def test_a_deleted_server_key_is_put_back(tmp_path: Path) -> None:
    """A running process restores its own key, so that the next start finds what was stored."""
    ring = Keyring(tmp_path)
    scope = ring.scope("a")
    (tmp_path / "server.key").unlink()
    ring.keep()
    assert Keyring(tmp_path).scope("a") == scope


@pytest.mark.usefixtures("capsys")  # the log goes to memory: files are bounded here
def test_a_full_disk_stops_no_tenant(tmp_path: Path) -> None:
    """A secret that cannot be written serves this process, and is kept as soon as there is room."""
    ring = Keyring(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        scope = ring.scope("a")
        assert ring.current(scope)
        with pytest.raises(OSError, match="too large"):
            ring.step("a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ring.current(scope)
    assert Keyring(tmp_path).scope("a") == scope
    assert not list((tmp_path / "tenants").glob(".*.key*"))
