from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as rules
from hypothesis import strategies as st

from router.settings import ConfigError, Settings, load, load_text
from router.tenant_config import TenantConfig
from shapes import Shape
from workers.config import PairConfig

KEY = "sk-very-secret-value"


def refusal(text: str) -> str:
    """What is said about a configuration that is refused."""
    with pytest.raises(ConfigError) as caught:
        load_text(text, "router.yaml")
    said = str(caught.value)
    assert "\n" not in said
    assert KEY not in said
    return said


def entry(params: str, more: str = "") -> str:
    return f"model_list: [{{model_name: g, litellm_params: {{{params}}}{more}}}]\n"


def one(params: str, more: str = ""):
    return load_text(entry(params, more)).model_list[0]


def test_reference_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.environ/NAME` as a whole value becomes the variable's value; inside other text it stays."""
    monkeypatch.setenv("SOME_KEY", KEY)
    params = one("model: openai/m, api_key: os.environ/SOME_KEY, api_base: 'http://os.environ/SOME_KEY'").litellm_params
    assert params is not None
    assert (params.api_key, params.api_base) == (KEY, "http://os.environ/SOME_KEY")


def test_variables_of_the_file_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`environment_variables` are seen by references, and may be references themselves."""
    monkeypatch.setenv("OUTER", KEY)
    settings = load_text(
        "environment_variables: {INNER: os.environ/OUTER}\n" + entry("model: m, api_key: os.environ/INNER")
    )
    params = settings.model_list[0].litellm_params
    assert params is not None
    assert params.api_key == KEY


REFUSED: list[tuple[str, list[str]]] = [
    (entry("model: openai/m, api_key: os.environ/NOT_SET_ANYWHERE"), ["router.yaml:1", "NOT_SET_ANYWHERE", "g"]),
    (f"model_list:\n  - model_name: g\n    litellm_params:\n      model: m\n     api_key: {KEY}\n", ["l:5", "line 5"]),
    (
        f"model_list:\n  - model_name: g\n    litellm_parms: {{api_key: {KEY}}}\n",
        ["router.yaml:3", "unknown key 'litellm_parms'", "model_list[0]", "model_name g"],
    ),
    (f"model_list: {{model_name: g, litellm_params: {{api_key: {KEY}}}}}", ["router.yaml:1", "model_list", "list"]),
    (f"- {KEY}", ["expected a mapping", "a list"]),
    (f"model_list: *{KEY}", ["router.yaml:1"]),
    ("a: 1\nmodel_list: []\nmodel_list: []\n", ["router.yaml:3", "'model_list'", "twice"]),
    ("model_list: &x [*x]", ["refers to itself"]),
    ("server: {prot: 4000}", ["server.prot", "unknown key"]),
    ("server: {port: http}", ["server.port", "whole number"]),
    ("server:\n  port: 70000", ["router.yaml:2", "server.port", "65535"]),
    ("modle_list: []", ["modle_list", "model_list?"]),
    ("general_settings: {master_kye: x}", ["general_settings.master_kye", "master_key"]),
    (f"general_settings: {{master_key: [{KEY}]}}", ["general_settings.master_key", "text"]),
    ("general_settings: {master_key: ''}", ["general_settings.master_key"]),
    ("router_settings: {routing_strategy: roulette}", ["routing_strategy", "simple-shuffle"]),
    (entry("model: m, timeout: soon"), ["litellm_params.timeout", "number"]),
    (entry("api_base: x"), ["litellm_params.model", "required"]),
    ("model_list: [{model_name: g}]", ["exactly one of"]),
    (entry("model: m", ", cache_params: {pair: p}"), ["exactly one of", "litellm_params and cache_params"]),
    ("model_list: [{model_name: g, cache_params: {pair: p}}]", ["cache_params.pair", "'p'", "pairs"]),
    ("model_list: [{model_name: g, local_params: {model: p}}]", ["local_params.model", "'p'", "models"]),
    ("model_list: [{model_name: g, relay_params: {sharer: g, receiver: h}}]", ["relay_params.sharer", "'g'"]),
    ("workers: [{name: w, pairs: [p]}]", ["'p'", "pairs"]),
    ("pairs: [{name: p, sharer: a, receiver: b}]", ["'a'", "models"]),
    ("store: {max_bytes: many}", ["store.max_bytes", "size"]),
    ("tenants: [{name: a, transports: [cash]}]", ["tenants[0].transports", "name a", "'text' or 'cache'"]),
    (f"tenants: [{{name: a, key: [{KEY}]}}]", ["tenants[0].key", "text"]),
    ("tenants: [{name: ../a}]", ["tenants[0].name"]),
    ("tenants: [{name: a, regulated: true, audit: {content: hash}}]", ["tenants[0]", "audit.content must be full"]),
    ("tenants: [{name: a, regulated: true, transports: [cache, text]}]", ["tenants[0]", "cache"]),
    ("1: x", ["unknown key"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_refusal_names_the_place(text: str, said: list[str]) -> None:
    """A wrong file is refused in one line that names file, line, key and what was expected, and no secret."""
    message = refusal(text)
    for part in said:
        assert part in message


def test_ids_written_twice() -> None:
    """Two entries cannot have one id."""
    text = "model_list:\n" + "- {model_name: g, litellm_params: {model: m}, model_info: {id: x}}\n" * 2
    assert "'x' is written twice" in refusal(text)


def test_ids_are_stable_and_differ() -> None:
    """An id survives a new key and a new place in the file; equal entries get different ones."""
    first = one("model: openai/m, api_key: a, max_tokens: 5").id
    assert one("max_tokens: 5, model: openai/m, api_key: b").id == first
    assert one("model: openai/m, api_key: a, max_tokens: 6").id != first
    twins = load_text("model_list:\n" + "- {model_name: g, litellm_params: {model: m}}\n" * 3).model_list
    assert len({d.id for d in twins}) == 3


KINDS: list[tuple[str, str, str, str | None]] = [
    ("model: openai/m", "http", "m", "https://api.openai.com/v1"),
    ("model: gpt-4o", "http", "gpt-4o", "https://api.openai.com/v1"),
    ("model: openai/org/m, api_base: 'http://h/v1/'", "http", "org/m", "http://h/v1"),
    ("model: m, api_base: 'http://h/v1'", "http", "m", "http://h/v1"),
    ("model: org/m, custom_llm_provider: openai, api_base: 'http://h/v1'", "http", "org/m", "http://h/v1"),
    ("model: hosted_vllm/org/m, api_base: 'http://h/v1'", "http", "org/m", "http://h/v1"),
    ("model: hosted_vllm/m", "litellm", "hosted_vllm/m", None),
    ("model: ollama/m, api_base: 'http://h'", "litellm", "ollama/m", "http://h"),
    ("model: ollama/m, api_base: 'http://h/v1'", "http", "m", "http://h/v1"),
    ("model: groq/m", "http", "m", "https://api.groq.com/openai/v1"),
    ("model: anthropic/m", "litellm", "anthropic/m", None),
    ("model: azure/m, api_base: 'http://h', api_version: '1'", "litellm", "azure/m", "http://h"),
    ("model: openai/m, mock_response: hi", "litellm", "openai/m", "https://api.openai.com/v1"),
]


@pytest.mark.parametrize(("params", "kind", "upstream", "base"), KINDS)
def test_kinds(params: str, kind: str, upstream: str, base: str | None) -> None:
    """What speaks OpenAI goes over plain HTTP with its prefix cut off; the rest goes through litellm as written."""
    deployment = one(params)
    assert (deployment.kind, deployment.upstream_model, deployment.api_base) == (kind, upstream, base)
    assert deployment.transport == "text"


def test_params_are_told_apart() -> None:
    """Keys that LiteLLM's router does not read are request defaults; the router's own stay out of a litellm call."""
    deployment = one("model: anthropic/m, rpm: 60, weight: 2, timeout: 5, temperature: 0, max_tokens: 9, api_key: k")
    params = deployment.litellm_params
    assert params is not None
    assert params.defaults == {"temperature": 0, "max_tokens": 9}
    assert set(params.for_litellm) == {"model", "timeout", "temperature", "max_tokens", "api_key"}
    assert (deployment.weight, deployment.timeout, deployment.order) == (2, 5, 1)


def test_secrets_are_not_shown() -> None:
    """Neither keys nor headers nor provider secrets appear when settings are printed."""
    text = entry(f"model: m, api_key: {KEY}, aws_secret_access_key: {KEY}, extra_headers: {{authorization: {KEY}}}") + (
        f"general_settings: {{master_key: {KEY}}}\nenvironment_variables: {{A: {KEY}}}\n"
        f"tenants: [{{name: a, key: {KEY}}}]"
    )
    assert KEY not in repr(load_text(text))


def test_overlapping_settings() -> None:
    """router_settings wins over litellm_settings, which wins over LiteLLM's defaults; 0 counts as written."""
    shared = "litellm_settings: {num_retries: 7, allowed_fails: 9, request_timeout: 60, fallbacks: [{a: [b]}]}\n"
    routing = load_text(shared + "router_settings: {num_retries: 0, fallbacks: [{c: [d]}]}").routing
    assert (routing.num_retries, routing.allowed_fails, routing.timeout) == (0, 9, 60)
    assert routing.fallbacks == {"c": ("d",)}
    plain = load_text("").routing
    assert (plain.num_retries, plain.allowed_fails, plain.cooldown_time, plain.max_fallbacks) == (2, 3, 5, 5)
    assert load_text("router_settings: {disable_cooldowns: true}").routing.cooldown_time == 0


def test_groups() -> None:
    """A model is found by alias, by name, then by the longest wildcard; the wildcard's part is passed on."""
    settings = load_text(
        "model_list:\n"
        "- {model_name: exact, litellm_params: {model: openai/x}}\n"
        "- {model_name: 'team/*', litellm_params: {model: 'openai/*'}}\n"
        "- {model_name: '*', litellm_params: {model: 'openai/*'}}\n"
        "router_settings: {model_group_alias: {short: exact, gone: {model: exact, hidden: true}}}\n"
    )
    found = [settings.group(m) for m in ("exact", "short", "gone", "team/a", "other")]
    assert found == ["exact", "exact", "exact", "team/*", "*"]
    assert settings.groups["team/*"][0].upstream_for("team/a") == "a"
    assert settings.groups["exact"][0].upstream_for("short") == "x"
    assert settings.routing.hidden == {"gone"}
    assert load_text("").group("x") is None


def test_variables_win_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """TWOLANE_ variables replace single values deep in the tree and leave their neighbours."""
    monkeypatch.setenv("TWOLANE_SERVER__PORT", "4711")
    monkeypatch.setenv("TWOLANE_REDIS__URL", "redis://elsewhere")
    settings = load_text("server: {host: 0.0.0.0, port: 1}\nrouter_settings: {redis_host: here}")
    assert (settings.server.host, settings.server.port, settings.redis.url) == ("0.0.0.0", 4711, "redis://elsewhere")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TWOLANE_SERVER__PORT", "x", "expected a whole number"),
        ("TWOLANE_SERVER__PROT", "1", "unknown key 'prot'"),
        ("TWOLANE_WORKERS", "[{", "expected JSON"),
        ("TWOLANE_TENANTS", '[{"name": "a", "x": 1}]', "unknown key 'x'"),
    ],
)
def test_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    """A wrong value from the environment is blamed on its variable, not on the file."""
    monkeypatch.setenv(name, value)
    assert refusal("server: {port: 1}") == f"environment variable {name}: {said}"


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    """Tenants, models and fusers that lie beside the file are found from any working directory."""
    (tmp_path / "tenants").mkdir()
    (tmp_path / "fuser").mkdir()
    file = tmp_path / "config.yaml"
    file.write_text(
        "tenants: tenants/\nmodels: [{name: m, model: org/model}]\n"
        "pairs: [{name: p, sharer: m, receiver: m, fuser: fuser},"
        " {name: q, sharers: [m, m], receiver: m, fusers: [fuser, org/fuser]}]"
    )
    settings = load(file)
    assert settings.tenants == (tmp_path / "tenants").resolve()
    beside = str((tmp_path / "fuser").resolve())
    assert settings.fleet.pairs[0].fuser == beside
    assert settings.fleet.pairs[1].fusers == (beside, "org/fuser")
    assert settings.models[0].model == "org/model"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_unreadable_file(tmp_path: Path, content: bytes | None) -> None:
    """A file that is missing or is not text is refused by name."""
    file = tmp_path / "nowhere.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(file)


def test_settings_are_frozen() -> None:
    """Nobody changes a setting in place; another listening address is another tree."""
    settings = load_text("")
    with pytest.raises(AttributeError, match="frozen"):
        settings.state_dir = Path("x")  # type: ignore[misc]
    moved = settings.with_server("0.0.0.0", None)
    assert (moved.loopback, moved.server.port, settings.loopback) == (False, 4000, True)
    assert isinstance(moved, Settings)


KEYS = re.findall(
    r"\w+",
    "model_list model_name litellm_params model api_key relay_params sharer receiver local_params cache_params pair "
    "model_info pairs models name workers tenants key keys transports redis url store server port router_settings "
    "fallbacks model_group_alias general_settings master_key environment_variables accept_unsupported guardrails",
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(KEYS)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | scalars, inner, max_size=4),
    max_leaves=12,
)


def outcome(text: str) -> str:
    """What is said about a file; empty where it is read."""
    try:
        load_text(text, "router.yaml")
    except ConfigError as error:
        return str(error)
    return ""


@given(st.dictionaries(st.sampled_from(KEYS), trees, max_size=4))
@rules(max_examples=100, deadline=None)
def test_any_tree_is_read_or_refused(data: dict[str, object]) -> None:
    """Whatever is written where, the file is read or refused in one line; nothing else is raised."""
    assert "\n" not in outcome(yaml.safe_dump(data))


@given(st.text(alphabet=st.characters() | st.sampled_from("\n:-{}[]&*!|>'\"% "), max_size=60))
@rules(max_examples=100, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    """Text that is not YAML, or YAML of another kind, is refused by name."""
    assert re.match(r"$|router\.yaml:\d+: ", outcome(text))


def test_merged_keys_have_lines() -> None:
    """Anchors and merges are read as in LiteLLM, and a wrong value is found where it is written."""
    text = (
        "model_list:\n"
        "- model_name: a\n"
        "  litellm_params: &base\n"
        "    model: openai/m\n"
        "    timeout: {soon}\n"
        "- model_name: b\n"
        "  litellm_params: {{<<: *base, rpm: 5}}\n"
    )
    assert load_text(text.format(soon=5)).model_list[1].timeout == 5
    assert "router.yaml:5" in refusal(text.format(soon="soon"))


def test_foreign_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TWOLANE_ variable that is no setting, such as the master key's, is nobody's mistake."""
    monkeypatch.setenv("TWOLANE_MASTER_KEY", "sk-m")
    settings = load_text("general_settings: {master_key: os.environ/TWOLANE_MASTER_KEY}")
    assert settings.general_settings.master_key == "sk-m"


def _defaults(model: type[Shape]) -> Iterator[Shape]:
    """Every model that stands as a default in a model, and in those."""
    for field in model.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Shape):
                yield from _defaults(kind)
        if isinstance(field.default, Shape):
            yield field.default


@pytest.mark.parametrize(
    "default", [*_defaults(Settings), *_defaults(TenantConfig), *_defaults(PairConfig)], ids=lambda d: type(d).__name__
)
def test_a_section_left_out_is_an_empty_one(default: Shape) -> None:
    """Defaults are made without validation, for a quick start; they are what validation makes of nothing."""
    assert default == type(default).model_validate({})
