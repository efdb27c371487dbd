from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

from router.litellm_config import TABLE, redis_url
from router.litellm_keys import TABLE_OF
from router.settings import ConfigError, GeneralSettings, LiteLLMParams, LiteLLMSettings, RouterSettings, load_text
from shapes import Shape

DOCS = Path(__file__).parents[2] / "docs" / "config.md"

AS_IT_COMES = """
model_list:
  - model_name: gpt-4o
    litellm_params: {model: azure/gpt-4o-eu, api_base: https://eu.example.com, api_key: sk-1, api_version: "1", rpm: 6}
    model_info: {mode: chat, supports_vision: true, base_model: azure/gpt-4o}
  - model_name: gpt-4o
    litellm_params: {model: openai/gpt-4o, api_key: sk-2, tags: [paid], temperature: 0.2}
  - model_name: "*"
    litellm_params: {model: "openai/*", api_key: sk-3}
litellm_settings:
  drop_params: true
  set_verbose: false
  json_logs: true
  success_callback: [langfuse]
  cache: true
  cache_params: {type: redis, host: localhost, ttl: 600}
  request_timeout: 30
  num_retries: 3
router_settings:
  routing_strategy: usage-based-routing-v2
  redis_host: cache.internal
  redis_port: 6380
  redis_password: "p@ss/word"
  enable_pre_call_checks: true
  model_group_alias: {gpt-4: gpt-4o}
  retry_policy: {TimeoutErrorRetries: 3}
general_settings:
  master_key: sk-1234
  database_url: postgresql://user@db/litellm
  alerting: [slack]
  background_health_checks: false
environment_variables: {OTEL_EXPORTER: none}
"""


def test_file_is_accepted_as_it_is() -> None:
    """A common LiteLLM file loads; exactly what has no effect is named, with its line; what is off is not."""
    settings = load_text(AS_IT_COMES)
    assert {f.key: f.line for f in settings.findings} == {
        "model_list[1].litellm_params.tags": 7,
        "litellm_settings.success_callback": 14,
        "litellm_settings.cache": 15,
        "litellm_settings.cache_params": 16,
        "router_settings.routing_strategy": 20,
        "general_settings.database_url": 29,
        "general_settings.alerting": 30,
    }
    assert settings.log.format == "json"
    assert settings.redis.url == "redis://:p%40ss%2Fword@cache.internal:6380/0"
    params = settings.model_list[1].litellm_params
    assert params is not None
    assert params.defaults == {"temperature": 0.2}


PROTECTS = [
    "guardrails: [{guardrail_name: pii, litellm_params: {guardrail: presidio, mode: pre_call}}]",
    "guardrails: [{guardrail_name: x, litellm_params: {guardrail: generic_guardrail_api, mode: logging_only}}]",
    "guardrails: [{guardrail_name: x, litellm_params: {guardrail: generic_guardrail_api, mode: pre_call, "
    "unreachable_fallback: fail_open}}]",
    "include: [other.yaml]",
    "credential_list: [{credential_name: c}]",
    "general_settings: {custom_auth: auth.check}",
    "general_settings: {allowed_ips: [10.0.0.1]}",
    "general_settings: {allowed_routes: [/v1/models]}",
    "general_settings: {public_routes: [/health]}",
    "general_settings: {enforce_user_param: true}",
    "general_settings: {global_max_parallel_requests: 5}",
    "litellm_settings: {max_budget: 10}",
    "router_settings: {provider_budget_config: {openai: {budget_limit: 1}}}",
    "model_list: [{model_name: g, litellm_params: {model: m}, model_info: {team_id: t}}]",
]


@pytest.mark.parametrize("text", PROTECTS)
def test_keys_that_protect_stop_the_start(text: str) -> None:
    """A key that protects is never dropped in silence: it stops the start until it is accepted by name."""
    with pytest.raises(ConfigError, match=r"accept_unsupported: \[[\w.]+\]") as caught:
        load_text(text)
    name = re.search(r"accept_unsupported: (\[[\w.]+\])", str(caught.value))
    assert name is not None
    settings = load_text(f"{text}\naccept_unsupported: {name[1]}")
    assert [f.kind for f in settings.findings] == ["refused"]


@pytest.mark.parametrize("text", ["guardrails: []", "general_settings: {allowed_ips: null, enforce_user_param: false}"])
def test_protection_that_is_off(text: str) -> None:
    """A protecting key without a value protects nothing, and stops nothing."""
    assert load_text(text).findings == ()


@pytest.mark.parametrize("key", ["cost_per_second", "input_cost_per_token_flex", "output_cost_per_second_1080p"])
def test_prices_that_are_not_billed(key: str) -> None:
    """A price of LiteLLM's that means nothing here is named, and never sent to the model."""
    settings = load_text(f"model_list: [{{model_name: g, litellm_params: {{model: openai/m, {key}: 1}}}}]")
    assert [f.key for f in settings.findings] == [f"model_list[0].litellm_params.{key}"]
    params = settings.model_list[0].litellm_params
    assert params is not None
    assert params.defaults == {}


def test_unknown_keys() -> None:
    """A key nobody knows is refused with a likely spelling, or accepted by name and then named."""
    with pytest.raises(ConfigError, match=r"router_settings\.num_retrys: unknown key.*num_retries"):
        load_text("router_settings: {num_retrys: 3}")
    settings = load_text("router_settings: {num_retrys: 3}\naccept_unsupported: [router_settings.num_retrys]")
    assert [f.key for f in settings.findings] == ["router_settings.num_retrys"]
    assert settings.routing.num_retries == 2


def test_misspelt_parameter_is_named() -> None:
    """Free keys of litellm_params become request defaults; one that looks like a known key is named."""
    settings = load_text("model_list: [{model_name: g, litellm_params: {model: m, api_bse: x, seed: 1}}]")
    assert [(f.key, "did you mean api_base?" in f.reason) for f in settings.findings] == [
        ("model_list[0].litellm_params.api_bse", True)
    ]


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ({}, None),
        (None, None),
        ({"redis_url": "rediss://u:p@h:1/2"}, "rediss://u:p@h:1/2"),
        ({"redis_host": "h"}, "redis://h:6379/0"),
        ({"redis_host": "h", "redis_port": 1, "redis_db": 2, "redis_password": "a b"}, "redis://:a%20b@h:1/2"),
        ({"redis_password": "x"}, None),
    ],
)
def test_redis_url(written: object, url: str | None) -> None:
    """LiteLLM's four keys make one URL, with the password encoded."""
    assert redis_url(written) == url


def test_own_redis_wins() -> None:
    """Where `redis` is written, LiteLLM's keys do not replace it."""
    assert load_text("redis: {url: embedded}\nrouter_settings: {redis_host: h}").redis.url == "embedded"


def test_each_key_has_one_class() -> None:
    """No key of a section stands in the table twice."""
    assert [key for key, count in Counter((row.scope, row.key) for row in TABLE).items() if count > 1] == []


@pytest.mark.parametrize(
    ("scope", "model"),
    [
        ("router_settings", RouterSettings),
        ("litellm_settings", LiteLLMSettings),
        ("general_settings", GeneralSettings),
        ("litellm_params", LiteLLMParams),
    ],
)
def test_what_works_is_read(scope: str, model: type[Shape]) -> None:
    """The keys classed as working are exactly those that the settings have."""
    extra = {"additional_drop_params"} if scope == "litellm_params" else set()
    assert {row.key for row in TABLE if row.scope == scope and row.kind == "works"} == set(model.model_fields) | extra


LITELLM = importlib.util.find_spec("litellm")


@pytest.mark.skipif(
    LITELLM is None or metadata.version("litellm") != TABLE_OF, reason="the table was not made for this litellm"
)
@pytest.mark.parametrize(
    ("scope", "file", "name"),
    [
        ("general_settings", "proxy/_types.py", "ConfigGeneralSettings"),
        ("router_settings", "types/router.py", "UpdateRouterConfig"),
        ("router_settings", "router.py", "_router_init"),
    ],
)
def test_every_key_of_litellm_is_in_the_table(scope: str, file: str, name: str) -> None:
    """Whatever LiteLLM's own models of these sections take is classed here; a new release is looked through once."""
    assert LITELLM is not None
    assert LITELLM.origin is not None
    tree = ast.parse(Path(LITELLM.origin).with_name(file.split("/")[0]).joinpath(*file.split("/")[1:]).read_text())
    [found] = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name]
    if isinstance(found, ast.FunctionDef):
        keys = {a.arg for a in found.args.args + found.args.kwonlyargs} - {"self", "model_list", "_host"}
    else:
        keys = {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert len(keys) > 10
    assert keys - {row.key for row in TABLE if row.scope == scope} == set()


def test_table_is_documented() -> None:
    """docs/config.md lists every key in its class, and no other."""
    written = set()
    section = ""
    for line in DOCS.read_text().splitlines():
        if found := re.match(r"#### `?([\w ]+?)`?$", line):
            section = "" if found[1] == "top level" else found[1]
        if found := re.match(r"\| (works|named|refused) \| (.+) \| .* \|$", line):
            written |= {(section, key, found[1]) for key in re.findall(r"`(\w+)`", found[2])}
    assert written == {(row.scope, row.key, row.kind) for row in TABLE}
