"""The command. Each subcommand imports what it needs when it runs, so that `--help` is instant.

Exit status: 0, 1 (it did not hold: a configuration refused, no deployment allowed), 2 (bad usage).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NoReturn

import click

if TYPE_CHECKING:
    from policies.facts import Decision, Hint
    from router.settings import Settings
    from router.tenants import TenantSource

ConfigOption = click.option(
    "--config",
    "config",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="TWOLANE_CONFIG",
    required=True,
    help="The configuration file; also TWOLANE_CONFIG.",
)


class Commands(click.Group):
    """Groups that other modules own, imported when they are called."""

    elsewhere: ClassVar[dict[str, str]] = {
        "audit": "router.audit_cli:audit_commands",
        "kv": "router.kv_cli:kv_commands",
        "pair": "router.pair_cli:pair_commands",
        "start": "router.stops_cli:start_command",
        "stop": "router.stops_cli:stop_command",
        "stops": "router.stops_cli:stops_command",
        "policy": "router.policy_cli:policy_commands",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.elsewhere})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.elsewhere:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.elsewhere[cmd_name].partition(":")
        found = getattr(import_module(module), name)
        return found if isinstance(found, click.Command) else None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="twolane-router", prog_name="twolane")
def main() -> None:
    """An OpenAI-compatible router with two lanes: text, and KV cache."""


@main.command()
@ConfigOption
@click.option("--host", help="Listen here instead of server.host.")
@click.option("--port", type=click.IntRange(0, 65535), help="Listen here instead of server.port.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Router processes.")
@click.option("--member", hidden=True, help="Be one of several; told by the parent.")
def serve(config: Path, host: str | None, port: int | None, workers: int, member: str | None) -> None:
    """Run the router, and the workers marked `spawn: true`."""
    _hasten()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload; it would end the process
    settings = _listening(_load(config), host, port)
    os.environ.update(settings.environment_variables)
    from router.settings import ConfigError

    try:
        if workers > 1:
            from router import processes

            gc.enable()
            processes.serve(settings, config, workers)
            return
        from router import app

        app.serve(settings, config, member)
    except ConfigError as error:
        _fail(str(error))


@main.command()
@ConfigOption
@click.option("--name", required=True, help="Which entry of `workers` to be.")
@click.option("--url", help="Listen here instead of the entry's url: unix:PATH or http://HOST:PORT.")
@click.option("--private", is_flag=True, help="Announce it to nobody and store nothing: for who knows its url.")
def worker(config: Path, name: str, url: str | None, private: bool) -> None:
    """Run one worker in the foreground."""
    settings = _load(config)
    entries = {w.name: w for w in settings.workers}
    if name not in entries:
        _fail(f"{config}: no worker is called {name!r}; there are: {', '.join(entries) or 'none'}")
    listen = url or entries[name].url
    if listen is None:
        _fail(f"{config}: worker {name!r} has no url to listen on; write one, or give --url")
    os.environ.update(settings.environment_variables)
    from workers.spin import let_threads_spin

    let_threads_spin(os.environ)
    from workers import server

    fleet = settings.fleet
    if fleet.redis.url == "embedded" and not private:
        from workers.embedded import EmbeddedRedis

        # Attaches to the router's server, or starts one where this worker runs alone.
        embedded = EmbeddedRedis(settings.redis_folder)
        embedded.start()
        fleet = fleet.model_copy(update={"redis": fleet.redis.model_copy(update={"url": embedded.url})})
    sys.exit(server.main(fleet, name, url=listen, private=private))


@main.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--strict", is_flag=True, help="Whatever would be a warning is an error.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(file: Path, strict: bool, as_json: bool) -> None:
    """Read a configuration and its tenants, and say what would not work.

    Exit status 1 when the router would refuse it, and when a regulated tenant would be without a backup.
    """
    from router.advice import advise
    from router.backups import unbacked

    settings = _listening(_load(file), None, None)
    tenants = _tenants(settings)
    problems = unbacked(settings, file)
    notes = [(f.key, str(f)) for f in settings.findings] + advise(settings, file)
    if as_json:
        told = [{"key": k, "note": n} for k, n in notes]
        click.echo(json.dumps({"ok": not problems and not (strict and notes), "notes": told, "problems": problems}))
    else:
        for problem in problems:
            click.echo(problem, err=True)
        for _, note in notes:
            click.echo(f"{file}: {note}", err=True)
        counts = (len(settings.groups), len(settings.model_list), len(settings.pairs), len(tenants.names))
        click.echo("{}: {} model groups, {} deployments, {} pairs, {} tenants".format(file, *counts))
    sys.exit(1 if problems or (strict and notes) else 0)


@main.command()
@click.argument("what", type=click.Choice(["config", "tenant"]), default="config")
def schema(what: str) -> None:
    """Print the JSON Schema of the configuration or of a tenant file, for editors."""
    from router.settings import Settings
    from router.tenant_config import TenantConfig

    model = Settings if what == "config" else TenantConfig
    click.echo(json.dumps(model.model_json_schema(), indent=2))


@main.command()
@ConfigOption
@click.option("--tenant", default="default", show_default=True, help="Decide as this tenant.")
@click.option("--transport", "hint", type=click.Choice(["auto", "text", "cache"]), default="auto", show_default=True)
@click.option("--workers", is_flag=True, help="As if the workers ran and held what the file lists.")
@click.option("--use-case", help="As if a key that is bound to this use case had been sent.")
@click.option("--labels", help="As x-twolane-labels would be sent; a classifier is not asked.")
@click.argument("request", type=click.File("rb"))
@click.option("--json", "as_json", is_flag=True, help="Print the decision as JSON.")
def decide(
    config: Path,
    tenant: str,
    hint: Hint,
    workers: bool,
    use_case: str | None,
    labels: str | None,
    request: BinaryIO,
    as_json: bool,
) -> None:
    """Decide about one chat completion without running it.

    REQUEST is its JSON body, or - for standard input. No worker is asked: without --workers no pair and no local model
    is available. Exit status 1 when no deployment is allowed.
    """
    from policies.decide import decide as choose
    from policies.decide import rule_names
    from router.errors import RouterError
    from router.offline import facts_of

    settings = _load(config)
    tenants = _tenants(settings)
    who = tenants.get(tenant)
    if who is None:
        _fail(f"no tenant is called {tenant!r}; there are: {', '.join(tenants.names)}")
    try:
        who = replace(who, use_case=use_case)
        facts = facts_of(settings, who, request.read(), hint=hint, workers=workers, labels=labels)
    except RouterError as error:
        _fail(f"request: {error}")
    decision = choose(who.policy, facts)
    _show(decision, rule_names(who.policy), as_json)
    sys.exit(0 if decision.chosen else 1)


def _hasten() -> None:
    """Spare the start what it does not need; the app turns the collector on again once it is built.

    What is imported stays: each walk over all of it takes 10 to 30 ms and frees little. Pydantic would look through the
    metadata of every installed distribution for plugins, which none here has use for.
    """
    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def _show(decision: Decision, rules: tuple[str, ...], as_json: bool) -> None:
    from policies.rules import REASONS

    if as_json:
        click.echo(json.dumps(_as_data(decision, rules)))
        return
    click.echo(f"{decision.chosen or 'none'}: {decision.reason}. {REASONS[decision.reason]}")
    for judged in _as_data(decision, rules)["judged"]:
        place = f"#{judged['rank']}" if judged["rank"] else "refused"
        click.echo(f"  {judged['deployment']} ({judged['transport']}) {place}")
        for verdict in judged["verdicts"]:
            if verdict["code"] != "ok":
                detail = f" [{verdict['detail']}]" if verdict["detail"] else ""
                click.echo(f"    {verdict['rule']}: {verdict['code']}{detail}. {REASONS[verdict['code']]}")


def _as_data(decision: Decision, rules: tuple[str, ...]) -> dict[str, Any]:
    from policies.rules import REASONS

    ranks = {name: place for place, name in enumerate(decision.ranked, 1)}
    return {
        "model": decision.model,
        "chosen": decision.chosen,
        "reason": decision.reason,
        "means": REASONS[decision.reason],
        "budget_missed": decision.budget_missed,
        "ranked": decision.ranked,
        "use_cases": decision.use_cases,
        "judged": [
            {
                "deployment": j.deployment,
                "transport": j.transport,
                "rank": ranks.get(j.deployment),
                "verdicts": [
                    {"rule": rule, "allowed": v.allowed, "code": v.code, "detail": v.detail, "means": REASONS[v.code]}
                    for rule, v in zip(rules, j.verdicts, strict=True)
                ],
            }
            for j in decision.judged
        ],
    }


def _load(path: Path) -> Settings:
    from router.settings import ConfigError, load

    try:
        return load(path)
    except ConfigError as error:
        _fail(str(error))


def _tenants(settings: Settings) -> TenantSource:
    from router.settings import ConfigError
    from router.tenants import TenantSource

    try:
        return TenantSource(settings)
    except ConfigError as error:
        _fail(str(error))


def _listening(settings: Settings, host: str | None, port: int | None) -> Settings:
    """With the command line's host and port; refuses to listen beyond this machine while nobody has a key."""
    settings = settings.with_server(host, port)
    if not settings.loopback and not _tenants(settings).has_keys:
        remedy = "set general_settings.master_key or give tenants keys"
        _fail(f"nobody has a key, so listening on {settings.server.host} is refused: {remedy}")
    return settings


def _fail(message: str) -> NoReturn:
    click.echo(f"twolane: {message}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
