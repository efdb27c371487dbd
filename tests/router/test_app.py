"""The application: pages, administration, reload."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from router.app import create_app
from router.settings import load_text
from router.transports.cache import KnownFleet
from tests.router.gateway import KEY, UP_KEY, Seen, Upstream, deployment, router, until, upstream
from tests.router.test_cache import config as lanes
from tests.router.test_cache import worker

MASTER = "sk-master-0123456789"


def _config(up: Upstream) -> dict[str, Any]:
    entries = [deployment("m", up), deployment("m", up, "twin"), deployment("n", up), deployment("wild/*", up, "*")]
    aliases = {"short": "m", "secret": {"model": "m", "hidden": True}}
    return {"model_list": entries, "router_settings": {"model_group_alias": aliases}}


async def test_models_are_the_tenants(tmp_path: Path) -> None:
    """Each group is listed once, aliases too unless hidden, and nothing that the tenant may not use."""
    async with upstream() as up:
        tenants = [{"name": "a", "key": KEY}, {"name": "b", "key": "sk-b-0123456789", "models": ["n"]}]
        async with router(tmp_path, {**_config(up), "tenants": tenants}) as door:
            all_ = (await door.get("/v1/models")).json
            few = (await door.get("/models", key="sk-b-0123456789")).json
            one, none = await door.get("/v1/models/m"), await door.get("/v1/models/zzz")
            aliased, wild = await door.post(model="short"), await door.post(model="wild/x")
            hidden = await door.post(model="secret")
    assert [m["id"] for m in all_["data"]] == ["m", "n", "short"]
    assert [m["id"] for m in few["data"]] == ["n"]
    assert (one.json["id"], none.status, none.error["code"]) == ("m", 404, "model_not_found")
    assert (aliased.status, wild.status, hidden.status) == (200, 200, 200)
    assert "x" in [s.body["model"] for s in up.seen]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing/here", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/models", 405),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/decisions/dec_none", 404),
        ("GET", "/admin/workers", 403),
    ],
)
async def test_errors_have_one_shape(tmp_path: Path, method: str, path: str, status: int) -> None:
    """Whatever is not served is told in OpenAI's shape."""
    async with upstream() as up, router(tmp_path, _config(up)) as door:
        headers = {"authorization": f"Bearer {KEY}"}
        async with door.session.request(method, path, headers=headers) as got:
            body = await got.json()
    assert got.status == status
    assert set(body["error"]) == {"message", "type", "param", "code"}


async def test_health_and_metrics_need_no_key(tmp_path: Path) -> None:
    """Probes and scrapes are answered without a key; metrics count what happened."""
    async with upstream() as up, router(tmp_path, _config(up)) as door:
        await door.post(model="n")
        await door.post(model="made-up-name")
        assert (await door.get("/health/liveliness", key=None)).json == "I'm alive!"
        ready = (await door.get("/health/readiness", key=None)).json
        text = (await door.get("/metrics", key=None)).raw.decode()
    assert ready == {"status": "healthy", "redis": "none", "workers": 0}
    assert 'twolane_requests_total{tenant="a",model="n",outcome="ok"} 1' in text
    assert "made-up-name" not in text


@pytest.mark.parametrize("key", [None, KEY, "sk-wrong"])
async def test_administration_needs_the_master_key(tmp_path: Path, key: str | None) -> None:
    """A tenant's key is refused, no key or a wrong one is unknown, and nothing is done."""
    async with upstream() as up, router(tmp_path, _config(up)) as door:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with door.session.post("/admin/reload", headers=headers) as got:
            assert got.status == (403 if key == KEY else 401)
        assert (await door.get("/admin/workers", key=key)).status == (403 if key == KEY else 401)


async def test_workers_and_pairs_are_shown(tmp_path: Path) -> None:
    """The administrator sees each worker and what it says of each configured pair."""
    async with upstream() as up, router(tmp_path, lanes(up), KnownFleet([worker("unix:/w.sock")])) as door:
        workers = (await door.get("/admin/workers", key=MASTER)).json["data"]
        pairs = (await door.get("/admin/pairs", key=MASTER)).json["data"]
    assert [w["name"] for w in workers] == ["w"]
    assert [(p["name"], p["workers"][0]["state"]["fingerprint"]) for p in pairs] == [("duo", "f" * 8)]


async def test_reload_puts_a_good_file_in_force(tmp_path: Path) -> None:
    """A reload serves new groups and tenants at once; a bad file is refused and changes nothing."""
    async with upstream() as up, router(tmp_path, _config(up)) as door:
        file = tmp_path / "router.yaml"
        written = yaml.safe_load(file.read_text())
        written["model_list"].append(deployment("fresh", up))
        written["tenants"].append({"name": "new", "key": "sk-new-0123456789"})
        assert (await door.post(model="fresh")).status == 404
        file.write_text(yaml.safe_dump(written))
        done = await door.post("/admin/reload", key=MASTER)
        assert done.json["tenants"]["added"] == ["new"]
        assert (await door.post(model="fresh", key="sk-new-0123456789")).status == 200
        file.write_text(yaml.safe_dump({**written, "model_lisst": []}))
        bad = await door.post("/admin/reload", key=MASTER)
        assert (bad.status, bad.error["code"]) == (422, "bad_config")
        assert "model_lisst" in bad.error["message"]
        assert (await door.post(model="fresh")).status == 200
        records = b"".join(p.read_bytes() for p in (tmp_path / "audit").rglob("*.jsonl"))
        assert records.count(b'"reload"') == 1


async def test_tenant_files_are_taken_up_when_they_change(tmp_path: Path) -> None:
    """A tenant file that is written is in force soon after, without a signal."""
    folder = tmp_path / "tenants"
    folder.mkdir()
    (folder / "a.yaml").write_text(yaml.safe_dump({"name": "a", "keys": [KEY]}))
    async with upstream() as up, router(tmp_path, {**_config(up), "tenants": str(folder)}) as door:
        assert (await door.get("/v1/models", key="sk-late-0123456789")).status == 401
        (folder / "late.yaml").write_text(yaml.safe_dump({"name": "late", "keys": ["sk-late-0123456789"]}))
        os.utime(folder / "late.yaml")
        await until(lambda: door.app.parts.tenants.find("sk-late-0123456789") is not None)
        assert (await door.get("/v1/models", key="sk-late-0123456789")).status == 200


async def test_the_configuration_is_taken_up_when_its_file_changes(tmp_path: Path) -> None:
    """A file that is written is in force soon after; a bad one leaves what runs, and a stream goes on through both."""
    passing = asyncio.Event()

    async def slow(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(seen.request)
        await response.write(b'data: {"choices": [{"delta": {"content": "first"}}]}\n\n')
        await passing.wait()
        await response.write(b'data: {"choices": [{"delta": {"content": "last"}}]}\n\ndata: [DONE]\n\n')
        return response

    async with upstream() as up, router(tmp_path, _config(up)) as door:
        up.answers["n"] = slow
        running = asyncio.create_task(door.post(model="n", stream=True))
        await until(lambda: any(s.body["model"] == "n" for s in up.seen))
        file = tmp_path / "router.yaml"
        written = yaml.safe_load(file.read_text())
        written["model_list"].append(deployment("fresh", up))
        file.write_text(yaml.safe_dump(written))
        await until(lambda: "fresh" in door.app.endpoint.dispatcher.settings.groups)
        file.write_text("model_list: [")
        await asyncio.sleep(1.5)
        assert (await door.post(model="fresh")).status == 200
        file.write_text(yaml.safe_dump({**written, "model_list": written["model_list"][:3]}))
        await until(lambda: "fresh" not in door.app.endpoint.dispatcher.settings.groups)
        passing.set()
        assert b"last" in (await running).raw


async def test_model_info_shows_what_serves_and_no_secret(tmp_path: Path) -> None:
    """Ids, prices and lanes in LiteLLM's shape; upstreams' addresses are for admins, keys for nobody."""
    async with upstream() as up:
        entry = deployment("m", up, input_cost_per_token=1e-6, extra_headers={"x-inner": "hidden-header"})
        entry["model_info"] = {"id": "one", "max_input_tokens": 4096, "team": "blue"}
        tenants = [{"name": "a", "key": KEY, "models": ["m"]}]
        login = up.base.replace("http://", "http://me:hidden-password@")
        config = {"model_list": [entry, deployment("n", up, api_base=login)], "tenants": tenants}
        async with router(tmp_path, config) as door:
            seen = await door.get("/v1/model/info")
            one = await door.get("/model/info?litellm_model_id=one")
            none = await door.get("/model/info?litellm_model_id=two")
            admin = await door.get("/model/info", key=MASTER)
            nobody = await door.get("/model/info", key="sk-wrong")
    (entry,) = seen.json["data"]
    assert entry["model_name"] == "m"
    assert entry["litellm_params"] == {"model": "openai/m"}
    told = entry["model_info"]
    assert (told["id"], told["max_input_tokens"], told["team"], told["db_model"]) == ("one", 4096, "blue", False)
    assert (told["input_cost_per_token"], told["transport"], told["kind"]) == (1e-6, "text", "http")
    assert one.json == seen.json
    assert (none.status, nobody.status) == (404, 401)
    assert [e["litellm_params"]["api_base"] for e in admin.json["data"]] == [up.base, up.base]
    for answer in (seen, one, none, admin):
        assert UP_KEY.encode() not in answer.raw
        assert b"hidden-" not in answer.raw


NEEDED = {
    *("_yaml", "yaml", "typing_extensions"),
    *("anyio", "python_multipart", "sniffio", "starlette"),
    *("click", "httptools", "uvicorn"),
    "msgspec",
    *("structlog", "attr", "pygments", "rich"),  # structlog takes rich where it is installed
    "_distutils_hack",
}


def test_a_plain_router_loads_little(tmp_path: Path) -> None:
    """A started router of the text lane holds the packages it works with and no other: no redis, aiohttp, torch."""
    file = tmp_path / "router.yaml"
    file.write_text(
        "model_list: [{model_name: m, litellm_params: {model: openai/m, api_base: http://127.0.0.1:9, api_key: k}}]\n"
        "tenants: [{name: a, key: sk-a, rpm_limit: 5, max_budget: 1}]\n"
        f"audit: {{dir: {tmp_path / 'audit'}}}\nstate_dir: {tmp_path / 'state'}\n"
    )
    script = f"""
import asyncio, gc, sys
gc.disable()
import router.cli
from router.app import create_app
from router.settings import load

async def main():
    messages = asyncio.Queue()
    messages.put_nowait({{"type": "lifespan.startup"}})
    async def send(message):
        assert message["type"].endswith("complete"), message
        assert gc.isenabled()
        messages.put_nowait({{"type": "lifespan.shutdown"}})
    await create_app(load({str(file)!r}))({{"type": "lifespan", "asgi": {{}}}}, messages.get, send)

asyncio.run(main())
places = {{name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items() if "." not in name}}
print(*(name for name, place in places.items() if "site-packages" in place))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "uvicorn" in loaded
    assert loaded <= NEEDED


def test_redis_is_seen_in_the_metrics() -> None:
    """`twolane_redis_up` says whether limits are shared; a router that shares none has no such metric."""
    settings = load_text("model_list: []\n", "router.yaml")
    away = create_app(settings, redis_url="unix:///nowhere.sock").parts.metrics.render().decode()
    assert "twolane_redis_up 0" in away.splitlines()
    assert "redis_up" not in create_app(settings).parts.metrics.render().decode()
