"""`twolane stop`, `start`, `stops`: the stop buttons of running routers, or of the file that they read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import click

_F = TypeVar("_F", bound=Callable[..., Any])
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one router said; `status` 0 where it said nothing that can be read."""

    url: str
    status: int
    body: dict[str, Any]

    @property
    def problem(self) -> str:
        error = self.body.get("error")
        if isinstance(error, dict):
            return str(error.get("message"))
        return "" if self.status == 200 else f"status {self.status}"


def _which_routers(command: _F) -> _F:
    url = click.option(
        "--url",
        "urls",
        multiple=True,
        default=("http://127.0.0.1:4000",),
        show_default=True,
        envvar="TWOLANE_URL",
        help="A router; give several to tell each of them.",
    )
    key = click.option("--key", envvar=["TWOLANE_ADMIN_KEY", "TWOLANE_MASTER_KEY"], help="Better in TWOLANE_ADMIN_KEY.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print each router's answer as it is, one a line.")
    return url(key(as_json(command)))


def _what_and_why(command: _F) -> _F:
    kind = click.argument("kind", type=click.Choice(["cache", "pair", "tenant"]))
    name = click.argument("name", required=False)
    reason = click.option("--reason", required=True, help="Stands in the audit log.")
    by = click.option("--by", help="On whose behalf, where that is not the key's owner; stands in the audit log.")
    file = click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write into this stops file instead of asking a router; its routers take it up.",
    )
    return kind(name(reason(by(file(command)))))


@click.command("stop")
@_what_and_why
@click.option("--drill", is_flag=True, help="An exercise: it stops all the same, and is recorded as one.")
@_which_routers
def stop_command(
    kind: str,
    name: str | None,
    reason: str,
    by: str | None,
    file: Path | None,
    drill: bool,
    urls: tuple[str, ...],
    key: str | None,
    as_json: bool,
) -> None:
    """Switch off the cache lane, one pair, or one tenant's cache lane.

    twolane stop cache --reason "answers drift since noon"; twolane stop pair smol-duo ...; twolane stop tenant bank ...

    Exit status 1 when a router does not do it, or does it and cannot keep or record it.
    """
    _press("POST", _target(kind, name), reason, by, file, drill, urls, key, as_json)


@click.command("start")
@_what_and_why
@_which_routers
def start_command(
    kind: str,
    name: str | None,
    reason: str,
    by: str | None,
    file: Path | None,
    urls: tuple[str, ...],
    key: str | None,
    as_json: bool,
) -> None:
    """Lift what `twolane stop` stopped."""
    _press("DELETE", _target(kind, name), reason, by, file, False, urls, key, as_json)


@click.command("stops")
@_which_routers
def stops_command(urls: tuple[str, ...], key: str | None, as_json: bool) -> None:
    """What is stopped, by whom, since when and why; and what runs on the cache lane all the same."""
    _show(_ask("GET", urls, "/admin/stops", key), as_json)


@click.command("reinstate")
@click.argument("pair")
@click.option("--reason", required=True, help="Stands in the audit log.")
@click.option("--by", help="On whose behalf, where that is not the key's owner.")
@_which_routers
def reinstate_command(
    pair: str, reason: str, by: str | None, urls: tuple[str, ...], key: str | None, as_json: bool
) -> None:
    """Put a demoted PAIR, or one that was swapped, in force as it is."""
    body = {"reason": reason, **({} if by is None else {"by": by})}
    path = f"/admin/pairs/{quote(pair, safe='')}/reinstate"
    answers = _ask("POST", urls, path, key, body)
    for answer in answers:
        if as_json:
            click.echo(json.dumps(answer.body))
        elif not answer.problem:
            click.echo(f"{answer.url}: {pair} is in force")
        else:
            click.echo(f"{answer.url}: {answer.problem}", err=True)
    if any(answer.problem for answer in answers):
        raise SystemExit(1)


def _target(kind: str, name: str | None) -> str:
    if (name is None) != (kind == "cache"):
        raise click.UsageError("cache takes no name" if kind == "cache" else f"{kind} needs a name")
    return kind if name is None else f"{kind}:{name}"


def _press(
    method: str,
    target: str,
    reason: str,
    by: str | None,
    file: Path | None,
    drill: bool,
    urls: tuple[str, ...],
    key: str | None,
    as_json: bool,
) -> None:
    if file is not None:
        _leave(file, method == "POST", target, reason, by, drill)
        return
    body: dict[str, Any] = {"target": target, "reason": reason}
    body |= {} if by is None else {"by": by}
    body |= {"drill": True} if drill else {}
    _show(_ask(method, urls, "/admin/stops", key, body), as_json)


def _leave(file: Path, stopped: bool, target: str, reason: str, by: str | None, drill: bool) -> None:
    from router.stops_file import BadStops, Wish, leave, read_target, read_words

    try:
        person = read_words("file" if by is None else by, "--by")
        leave(file, Wish(read_target(target), stopped, read_words(reason, "--reason"), person, drill))
    except (BadStops, OSError) as error:
        raise click.ClickException(f"{file}: {error}") from error
    click.echo(f"{target}: written to {file}; routers that read it take it up within half a second")


def _show(answers: list[Answer], as_json: bool) -> None:
    for answer in answers:
        if as_json:
            click.echo(json.dumps(answer.body))
            continue
        if "data" in answer.body:
            stops = answer.body["data"]
            click.echo(f"{answer.url}: {'nothing is stopped' if not stops else ''}".rstrip())
            for stop in stops:
                since = datetime.fromtimestamp(stop["at"], UTC).isoformat(timespec="seconds")
                drill = " (a drill)" if stop["drill"] else ""
                click.echo(f"  {stop['target']} stopped since {since} by {stop['by']}{drill}: {stop['reason']}")
            for call in answer.body["running"]:
                click.echo(f"  still runs: {call['id']} of {call['tenant']} on {call['pair']}, {call['seconds']:g} s")
        for words in (answer.body.get("note"), answer.problem):
            if words:
                click.echo(f"{answer.url}: {words}", err=True)
    if any(answer.problem for answer in answers):
        raise SystemExit(1)


def _ask(
    method: str, urls: tuple[str, ...], path: str, key: str | None, body: dict[str, Any] | None = None
) -> list[Answer]:
    """All routers at once: none waits for another that hangs."""

    async def all_() -> list[Answer]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            return list(await asyncio.gather(*(_one(session, method, url, path, body) for url in urls)))

    return asyncio.run(all_())


async def _one(session: aiohttp.ClientSession, method: str, url: str, path: str, body: dict[str, Any] | None) -> Answer:
    try:
        async with session.request(method, url.rstrip("/") + path, json=body, allow_redirects=False) as response:
            read = json.loads(await response.read())
            return Answer(url, response.status, read if isinstance(read, dict) else {})
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return Answer(url, 0, {"error": {"message": f"no answer that can be read ({type(error).__name__})"}})
