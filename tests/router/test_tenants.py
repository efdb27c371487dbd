from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from router.settings import ConfigError, Settings, load, load_text
from router.tenants import TenantSource

LISTED = """
general_settings: {master_key: sk-master}
tenants:
- {name: a, key: sk-a}
- {name: b, keys: [sk-b1, sk-b2], rpm_limit: 5, tpm_limit: 100, max_parallel_requests: 1, models: [m]}
"""


def source(text: str, **options: bool) -> TenantSource:
    return TenantSource(load_text(text), **options)


def folder(tmp_path: Path, **files: str) -> tuple[Settings, Path]:
    place = tmp_path / "tenants"
    place.mkdir(exist_ok=True)
    for name, text in files.items():
        (place / f"{name}.yaml").write_text(text)
    config = tmp_path / "config.yaml"
    config.write_text("tenants: tenants\n")
    return load(config), place


def name_of(tenants: TenantSource, key: str | None) -> str | None:
    tenant = tenants.find(key)
    return None if tenant is None else tenant.name


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("sk-a", "a"),
        ("sk-b1", "b"),
        ("sk-b2", "b"),
        ("sk-master", "default"),
        ("sk-A", None),
        ("sk-a ", None),
        ("", None),
        (None, None),
        ("sk-\udcff", None),
        (hashlib.sha256(b"sk-a").hexdigest(), None),
        ("sha256:" + hashlib.sha256(b"sk-a").hexdigest(), None),
    ],
)
def test_find(key: str | None, name: str | None) -> None:
    """A key finds its tenant, and only the key does: neither its digest nor anything near it."""
    assert name_of(source(LISTED), key) == name


def test_limits_and_policy_arrive() -> None:
    """What is written about a tenant is what the tenant carries."""
    tenant = source(LISTED).get("b")
    assert tenant is not None
    assert (tenant.rpm_limit, tenant.tpm_limit, tenant.max_parallel_requests) == (5, 100, 1)
    assert tenant.policy.models == ("m",)
    assert source(LISTED).get("c") is None


def test_hashed_key() -> None:
    """LiteLLM's hashed virtual key is as good as the key it was made of, in upper case too."""
    digest = hashlib.sha256(b"sk-x").hexdigest()
    for written in (digest, digest.upper()):
        assert name_of(source(f"tenants: [{{name: x, key: 'sha256:{written}'}}]"), "sk-x") == "x"
    with pytest.raises(ConfigError, match=r"tenants\[0\]\.key.*64 hex digits"):
        source("tenants: [{name: x, key: 'sha256:abc'}]")


def test_master_key_of_a_tenant() -> None:
    """A master key that a tenant lists belongs to that tenant, and is the administrator's all the same."""
    tenants = source("general_settings: {master_key: sk-a}\ntenants: [{name: a, key: sk-a}, {name: b, key: sk-b}]")
    assert (name_of(tenants, "sk-a"), tenants.names) == ("a", ("a", "b"))
    assert [tenants.is_admin(key) for key in ("sk-a", "sk-b", "", None)] == [True, False, False, False]


def test_keys_of_use_cases() -> None:
    """A key of a use case belongs to its tenant and says which use case; the tenant's other keys say none."""
    cases = "[{id: x, owner: kim, risk: low, keys: [sk-x, sk-a]}, {id: y, owner: kim, risk: low, keys: [sk-y]}]"
    tenants = source(f"tenants: [{{name: a, keys: [sk-a, sk-b], use_cases: {cases}}}]")
    found = {key: tenants.find(key) for key in ("sk-a", "sk-b", "sk-x", "sk-y")}
    assert {key: tenant and tenant.name for key, tenant in found.items()} == dict.fromkeys(found, "a")
    bound = {key: tenant and tenant.use_case for key, tenant in found.items()}
    assert bound == {"sk-a": "x", "sk-b": None, "sk-x": "x", "sk-y": "y"}
    digest = hashlib.sha256(b"sk-x").hexdigest()
    assert all(d not in repr(t) + str(t and t.record) for d in ("sk-x", digest) for t in found.values())


def test_no_key_configured() -> None:
    """Without any key the whole machine is tenant default, whatever key a client sends; beyond loopback nobody is."""
    assert [name_of(source("", loopback=True), key) for key in (None, "sk-any")] == ["default", "default"]
    assert [name_of(source("", loopback=False), key) for key in (None, "sk-any")] == [None, None]
    assert not source("", loopback=False).is_admin(None)


def test_keys_without_a_master_key() -> None:
    """On loopback a call without a key is tenant default's, and a wrong key is still refused."""
    text = "tenants: [{name: a, key: sk-a}]"
    assert [name_of(source(text), key) for key in ("sk-a", None, "sk-b")] == ["a", "default", None]
    assert [name_of(source(text, loopback=False), key) for key in ("sk-a", None)] == ["a", None]


def test_default_may_be_written() -> None:
    """A tenant called default is the one that a call without a key belongs to."""
    tenant = source("tenants: [{name: default, models: [m]}]").find(None)
    assert tenant is not None
    assert tenant.policy.models == ("m",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants: [{name: a, key: sk-a}, {name: a, key: sk-b}]", "'a' is used twice"),
        ("tenants: [{name: a, key: sk-secret}, {name: b, keys: [sk-secret]}]", "'a' and 'b' have the same key"),
        (
            "tenants: [{name: a, use_cases: [{id: x, owner: k, risk: low, keys: [sk-secret]}, "
            "{id: y, owner: k, risk: low, keys: [sk-secret]}]}]",
            "one key is bound to two use cases",
        ),
        ("tenants: [{name: a, classifier: {use: 'm:C'}}]", "classifier"),
        (
            "tenants:\n- name: a\n  rules:\n  - use: 'no.such:Rule'",
            r"config:4: tenants\[0\].rules\[0\].*No module named",
        ),
        ("tenants: nowhere/at/all", "is not a folder"),
    ],
)
def test_refused(text: str, said: str) -> None:
    """Names and keys are unique and the folder exists; the key is not in the message."""
    with pytest.raises(ConfigError, match=said) as caught:
        source(text)
    assert "sk-secret" not in str(caught.value)


def test_keys_are_not_kept() -> None:
    """No key survives in the settings or in the tenants."""
    settings = load_text(LISTED.replace("master_key: sk-master", ""))
    assert settings.tenants is not None
    kept = [t.model_dump_json() for t in settings.tenants if not isinstance(t, str)]  # type: ignore[union-attr]
    assert not any("sk-" in text for text in kept)


def test_regulated_records_in_full() -> None:
    """A regulated tenant's record is full without being told."""
    tenant = source("tenants: [{name: a, regulated: true}, {name: b}]")
    assert [tenant.get(n).audit.content for n in ("a", "b")] == ["full", "hash"]  # type: ignore[union-attr]


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each YAML file is a tenant, references are resolved, hidden and other files are left out."""
    monkeypatch.setenv("A_KEY", "sk-from-env")
    settings, place = folder(tmp_path, a="name: a\nkeys: [os.environ/A_KEY]\n", b="name: b\nkey: sk-b\n")
    (place / ".b.yaml.swp").write_text("name: [")
    (place / ".hidden.yaml").write_text("name: [")
    (place / "notes.txt").write_text("name: [")
    tenants = TenantSource(settings)
    assert tenants.names == ("a", "b", "default")
    assert name_of(tenants, "sk-from-env") == "a"


def test_reload(tmp_path: Path) -> None:
    """A reload takes up what was added, changed and removed, and says so."""
    settings, place = folder(tmp_path, a="name: a\nkey: sk-a\n", b="name: b\nkey: sk-b\n")
    tenants = TenantSource(settings)
    assert not tenants.changed()
    assert not tenants.reload()
    (place / "b.yaml").unlink()
    (place / "c.yaml").write_text("name: c\nkey: sk-c\n")
    (place / "a.yaml").write_text("name: a\nkey: sk-a2\nregulated: true\n")
    assert tenants.changed()
    change = tenants.reload()
    assert (change.added, change.removed, change.changed) == (("c",), ("b",), ("a",))
    assert [name_of(tenants, key) for key in ("sk-a", "sk-a2", "sk-b", "sk-c")] == [None, "a", None, "c"]
    assert not tenants.changed()


def test_bad_file_keeps_what_was(tmp_path: Path) -> None:
    """A file that cannot be meant is refused by name and line; all tenants stay as they were, and it is not retried."""
    settings, place = folder(tmp_path, a="name: a\nkey: sk-a\n", b="name: b\nkey: sk-b\n")
    tenants = TenantSource(settings)
    (place / "a.yaml").unlink()
    (place / "b.yaml").write_text("name: b\nkey: sk-b2\nregulatd: true\n")
    with pytest.raises(ConfigError, match=r"b\.yaml:3: regulatd: unknown key"):
        tenants.reload()
    assert [name_of(tenants, key) for key in ("sk-a", "sk-b", "sk-b2")] == ["a", "b", None]
    assert not tenants.changed()
    (place / "b.yaml").write_text("name: b\nkey: sk-b2\n")
    os.utime(place / "b.yaml", ns=(1, 1))
    assert tenants.changed()
    tenants.reload()
    assert [name_of(tenants, key) for key in ("sk-a", "sk-b2")] == [None, "b"]


def test_reload_from_settings() -> None:
    """Tenants listed in the configuration change with it, and so does the master key."""
    tenants = source(LISTED)
    tenants.reload(load_text("general_settings: {master_key: sk-new}\ntenants: [{name: a, key: sk-a}]"))
    assert [name_of(tenants, key) for key in ("sk-a", "sk-b1", "sk-master")] == ["a", None, None]
    assert tenants.is_admin("sk-new")
    with pytest.raises(ConfigError):
        tenants.reload(load_text("general_settings: {master_key: sk-newer}\ntenants: nowhere"))
    assert tenants.is_admin("sk-new")


def test_digest_names_what_is_written() -> None:
    """The digest follows every change of a tenant, and a change of key, but holds no key."""
    texts = ("{name: a}", "{name: a, rpm_limit: 1}", "{name: a, key: sk-1}", "{name: a, key: sk-2}")
    digests = {source(f"tenants: [{text}]").get("a").digest for text in texts}  # type: ignore[union-attr]
    assert len(digests) == 4
