from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from policies.rules import REASONS
from router.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "config.example.yaml"
REQUEST = {
    "model": "assistant",
    "messages": [{"role": "system", "content": "a long document"}, {"role": "user", "content": "and?"}],
}


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)


def decided(tenant: str, *options: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    body = json.dumps(REQUEST | changes)
    result = run("decide", "--config", EXAMPLE, "--tenant", tenant, *options, "--json", "-", stdin=body)
    return result.exit_code, json.loads(result.stdout)


def test_example_holds() -> None:
    """The example and its tenants load; the only notes are the demo keys that are written out."""
    result = run("check", EXAMPLE, "--json")
    assert result.exit_code == 0
    notes = json.loads(result.stdout)["notes"]
    assert [note["key"] for note in notes] == ["keys[0]"] * 3
    assert run("check", EXAMPLE, "--strict").exit_code == 1


def test_check_names_what_has_no_effect(tmp_path: Path) -> None:
    """What would be a warning at start is told by check with its line, and fails it under --strict."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "model_list:\n- {model_name: g, litellm_params: {model: m, api_key: 'sk-plain', api_base: '${HOST}'}}\n"
        "general_settings: {database_url: 'postgres://x'}\nrouter_settings: {fallbacks: [{g: [nobody]}]}\n"
    )
    result = run("check", file)
    assert result.exit_code == 0
    for part in ("line 2", "api_key is written out", "${...}", "database_url", "line 3", "'nobody'"):
        assert part in result.stderr
    assert "sk-plain" not in result.output
    assert run("check", file, "--strict").exit_code == 1


def test_the_start_names_what_has_no_effect(tmp_path: Path) -> None:
    """Keys that do nothing here and names that lead nowhere are told when the router starts, not by check alone."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "model_list:\n- {model_name: g, litellm_params: {model: m}}\ngeneral_settings: {alerting: [slack]}\n"
        "router_settings: {fallbacks: [{g: [nobody]}, {stranger: [g]}], default_fallbacks: [none]}\n"
        f"state_dir: {tmp_path}/state\naudit: {{dir: {tmp_path}/audit}}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "router.cli", "serve", "--config", str(file), "--port"]
        ended = subprocess.run(
            [*command, str(taken.getsockname()[1])], capture_output=True, text=True, timeout=60, check=False
        )
    told = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    assert ended.returncode != 0, "the port is taken"
    found = [(line["event"], line["finding"]) for line in told if "finding" in line]
    assert [event for event, _ in found] == ["unsupported"] + ["leads_nowhere"] * 3
    for (_, finding), part in zip(found, ("alerting", "'none'", "'nobody'", "'stranger'"), strict=True):
        assert part in finding


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "{file}"),
        ("serve", "--config", "{file}"),
        ("worker", "--config", "{file}", "--name", "w"),
        ("decide", "--config", "{file}", "-"),
    ],
)
def test_wrong_file_is_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A refused configuration ends every command with status 1 and one line on stderr."""
    file = tmp_path / "router.yaml"
    file.write_text("model_list:\n  - model_name: g\n   x: sk-secret\n")
    result = run(*(a.format(file=file) for a in arguments), stdin="{}")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "router.yaml:3" in result.stderr
    assert "sk-secret" not in result.stderr


@pytest.mark.parametrize("arguments", [("serve",), ("nonsense",), ("schema", "nothing"), ("check",)])
def test_bad_usage(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that cannot be understood ends with status 2."""
    monkeypatch.delenv("TWOLANE_CONFIG", raising=False)
    assert run(*arguments).exit_code == 2


def test_no_traceback_from_a_real_process(tmp_path: Path) -> None:
    """Run as a program, a missing variable ends the start with its name and status 1."""
    file = tmp_path / "router.yaml"
    file.write_text("model_list: [{model_name: g, litellm_params: {model: m, api_key: os.environ/NOT_SET_ANYWHERE}}]")
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "NOT_SET_ANYWHERE" in done.stderr
    assert "Traceback" not in done.stderr


def test_open_router_stays_on_this_machine(tmp_path: Path) -> None:
    """Without any key, listening beyond loopback is refused."""
    file = tmp_path / "router.yaml"
    file.write_text("model_list: []")
    result = run("serve", "--config", file, "--host", "0.0.0.0")
    assert result.exit_code == 1
    assert "nobody has a key" in result.stderr


def test_unknown_worker(tmp_path: Path) -> None:
    """A worker must be one that the file names, and must know where to listen."""
    file = tmp_path / "router.yaml"
    file.write_text("workers: [{name: one, spawn: true}]")
    assert "'two'" in run("worker", "--config", file, "--name", "two").stderr
    assert "no url" in run("worker", "--config", file, "--name", "one").stderr


@pytest.mark.parametrize(("what", "key"), [("config", "model_list"), ("tenant", "regulated")])
def test_schema(what: str, key: str) -> None:
    """The printed schema is JSON Schema of the right file, and refuses unknown keys."""
    schema = json.loads(run("schema", what).stdout)
    assert key in schema["properties"]
    assert schema["additionalProperties"] is False


def test_decisions_differ_by_tenant() -> None:
    """Offline, with workers assumed, the example's tenants are decided as their files say."""
    status, lab = decided("lab", "--workers")
    assert (status, lab["reason"]) == (0, "cache_preferred")
    status, bank = decided("bank", "--workers")
    assert (status, bank["reason"]) == (0, "regulated_text_only")
    lanes = {j["deployment"]: j["transport"] for j in bank["judged"]}
    assert [lanes[id] for id in bank["ranked"]] == ["text", "text"]


def test_decision_without_workers() -> None:
    """Nothing is held offline: the decision refuses all and says what is missing."""
    status, decision = decided("lab")
    assert (status, decision["chosen"], decision["reason"]) == (1, None, "pair_unavailable")


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        (("--transport", "text"), {}, "hint_text"),
        ((), {"messages": [{"role": "user", "content": "hi"}]}, "no_context"),
        ((), {"stream": True}, "cache_preferred"),
    ],
)
def test_request_counts(options: tuple[str, ...], changes: dict[str, Any], reason: str) -> None:
    """The offline decision looks at the request as the router does."""
    assert decided("lab", "--workers", *options, **changes)[1]["reason"] == reason


def test_decision_for_people() -> None:
    """Without --json the reason and each refusal come with their sentences."""
    arguments = ("decide", "--config", EXAMPLE, "--tenant", "bank", "--workers", "-")
    told = run(*arguments, stdin=json.dumps(REQUEST)).stdout
    assert REASONS["regulated_text_only"] in told
    assert "#1" in told


@pytest.mark.parametrize(
    ("tenant", "body", "said"),
    [("nobody", "{}", "'nobody'"), ("lab", "[]", "JSON object"), ("lab", '{"model": "x"}', "'x'")],
)
def test_wrong_request(tenant: str, body: str, said: str) -> None:
    """An unknown tenant, a body that is no request and an unknown model are told in one line."""
    result = run("decide", "--config", EXAMPLE, "--tenant", tenant, "-", stdin=body)
    assert result.exit_code == 1
    assert said in result.stderr


def test_help_is_light() -> None:
    """The command line itself loads neither torch nor the web stack."""
    code = (
        "import sys, router.cli; print([m for m in ('torch', 'aiohttp', 'starlette', 'litellm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        "policy replay",
        "audit verify",
        "audit show a",
        "audit export a",
        "audit holds",
        "audit replay dec_1",
        "audit evidence --tenant a --by kim pack",
        "audit hold --tenant a --by kim --reason x",
        "audit erase --tenant a --by kim --reason x --yes",
    ],
)
def test_without_a_log_the_commands_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Where no router ran yet each command that reads the log ends in one sentence, with status 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("tenants: [{name: a}]\naudit: {dir: nowhere}\n")
    done = CliRunner().invoke(main, [*command.split(), "--config", "config.yaml"])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.output
    assert "nowhere" in done.output
    assert not (tmp_path / "nowhere").exists()
