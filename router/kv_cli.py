"""`twolane kv`: what a running router's workers keep, and its purge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import click

_F = TypeVar("_F", bound=Callable[..., Any])
_PATIENCE_S = 90.0


def _which_router(command: _F) -> _F:
    """`--url`, `--key` and `--json`."""
    url = click.option("--url", default="http://127.0.0.1:4000", show_default=True, envvar="TWOLANE_URL")
    key = click.option("--key", envvar=["TWOLANE_ADMIN_KEY", "TWOLANE_MASTER_KEY"], help="Better in TWOLANE_ADMIN_KEY.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the router's answer as it is.")
    return url(key(as_json(command)))


@click.group("kv")
def kv_commands() -> None:
    """KV that workers keep for later requests."""


@kv_commands.command("stats")
@_which_router
def stats(url: str, key: str | None, as_json: bool) -> None:
    """What each worker's store holds. Exit status 1 when one does not answer."""
    _, answer = _ask("GET", f"{url.rstrip('/')}/admin/kv", key)
    workers = answer["data"]
    if as_json:
        click.echo(json.dumps(answer))
    else:
        for worker in workers:
            click.echo(_stats_line(worker))
    if any(worker["error"] for worker in workers):
        raise SystemExit(1)


@kv_commands.command("purge")
@_which_router
@click.argument("tenant")
def purge(url: str, key: str | None, as_json: bool, tenant: str) -> None:
    """Destroy all KV of TENANT on every worker. Exit status 1 when it is not complete or not recorded."""
    status, answer = _ask("DELETE", f"{url.rstrip('/')}/admin/tenants/{quote(tenant, safe='')}/kv", key)
    if as_json:
        click.echo(json.dumps(answer))
    else:
        click.echo(f"{tenant}: {answer['entries']} entries, {answer['bytes']} bytes destroyed")
        for worker in answer["workers"]:
            destroyed = f"{worker['entries']} entries, {worker['bytes']} bytes"
            click.echo(f"  {worker['worker']}: {'NOT PURGED, ' + worker['error'] if worker['error'] else destroyed}")
        if not answer["configured"]:
            click.echo(f"  note: no tenant is called {tenant!r} now")
        if "error" in answer:
            click.echo(answer["error"]["message"], err=True)
    if status != 200:
        raise SystemExit(1)


def _stats_line(worker: dict[str, Any]) -> str:
    if worker["error"]:
        return f"{worker['worker']}: {worker['error']}"
    kv = worker["kv"]
    counts = kv["counters"]
    tiers = [name.removesuffix("_segments") for name in kv if name.endswith("_segments")]
    held = ", ".join(f"{tier} {_amount(kv, tier)}" for tier in tiers)
    used = f"{counts['hits']} hits, {counts['misses']} misses, {counts['tokens']} tokens reused"
    return f"{worker['worker']}: {held}; {used}"


def _amount(kv: dict[str, Any], tier: str) -> str:
    """None stands for an index that is away."""
    segments, size = kv[f"{tier}_segments"], kv[f"{tier}_bytes"]
    return "unknown (index away)" if segments is None else f"{segments} segments ({size} bytes)"


def _ask(method: str, url: str, key: str | None) -> tuple[int, dict[str, Any]]:
    """Status and body; an answer without what was asked for ends the command with the router's words."""
    try:
        status, answer = asyncio.run(_fetch(method, url, key))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise click.ClickException(f"{url}: no answer that can be read ({type(error).__name__})") from error
    if isinstance(answer, dict) and ("data" in answer or "workers" in answer):
        return status, answer
    said = answer.get("error") if isinstance(answer, dict) else None
    raise click.ClickException(f"{url}: {said['message'] if isinstance(said, dict) else f'status {status}'}")


async def _fetch(method: str, url: str, key: str | None) -> tuple[int, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, url, headers=headers, allow_redirects=False) as response,
    ):
        return response.status, json.loads(await response.read())
