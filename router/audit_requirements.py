"""Which file of an evidence pack speaks to which requirement, and what it leaves open. Evidence, never a verdict.

The rules are told in our own words; whoever relies on one reads it where it was published. The Korean guidance is known
here from reports on its announcement of 22 December 2025 (seven principles, to be applied by self-regulation), not from
its final text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_DAY = 86400.0
SIX_MONTHS = 183 * _DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a pack's gaps depend on."""

    holds: bool
    lost: int
    """Records that could not be written."""
    anchored: bool
    content: str
    """none | hash | full, as configured now; empty where the tenant is not configured."""
    regulated: bool
    retention: float | None
    """Seconds; None keeps for ever."""
    removed: bool
    """Records of the period are gone, their retention having ended."""
    unreported: tuple[str, ...]
    """Pairs without a report."""
    drills: int
    named: bool
    """All changes name a person."""


Gap = Callable[[Seen], str]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One row of the table."""

    source: str
    asks: str
    files: tuple[str, ...]
    gap: Gap


def _log(seen: Seen) -> str:
    gaps = [] if seen.holds else ["the chain does not hold: see chain.json"]
    gaps += [f"{seen.lost} records could not be written"] if seen.lost else []
    gaps += ["records of the period were removed when their retention ended"] if seen.removed else []
    return "; ".join(gaps)


def _kept(seen: Seen) -> str:
    if seen.retention is not None and seen.retention < SIX_MONTHS:
        return f"retention is {seen.retention / _DAY:.0f} days, less than six months"
    return "" if seen.retention is not None else "no end of retention is set: other law may ask for one"


def _tamper(seen: Seen) -> str:
    gaps = [] if seen.anchored else ["heads were not compared with an anchor: who holds the signing key could rewrite"]
    gaps += [] if seen.holds else ["the chain does not hold"]
    return "; ".join([*gaps, "detection of attacks, network separation and other controls are not shown here"])


def _reports(seen: Seen) -> str:
    missing = f"no report of: {', '.join(seen.unreported)}; " if seen.unreported else ""
    return f"{missing}quality and fairness of models reached over the network are for their provider and you to show"


def _content(seen: Seen) -> str:
    kept = {"none": "texts were not kept", "hash": "of texts only digests were kept"}.get(seen.content, "")
    return "; ".join(part for part in (kept, "which events mean a risk in your use, you define") if part)


def _drilled(seen: Seen) -> str:
    return "" if seen.drills else "no drill of the stop in the period"


def _people(seen: Seen) -> str:
    unnamed = "" if seen.named else "some changes name a key or a file and no person; "
    return f"{unnamed}bodies, roles and the separate risk function are not shown here"


def _always(text: str) -> Gap:
    return lambda seen: text


EU = "EU AI Act (Regulation 2024/1689)"
KR = "Korea, FSC AI guideline for finance"

REQUIREMENTS = (
    Requirement(
        f"{EU}, Art. 12(1)",
        "events are recorded automatically, as long as the system lives",
        ("records.jsonl", "chain.json"),
        _log,
    ),
    Requirement(
        f"{EU}, Art. 12(2)(a)",
        "records show situations that may be a risk, or a substantial modification",
        ("changes.json", "incidents.json", "refusals.csv", "inventory.json"),
        _content,
    ),
    Requirement(
        f"{EU}, Art. 12(2)(b)",
        "records serve monitoring after the system is on the market (Art. 72)",
        ("summary.json", "inventory.json"),
        _reports,
    ),
    Requirement(
        f"{EU}, Art. 12(2)(c) and 26(5)",
        "records serve the deployer's own monitoring",
        ("summary.json", "incidents.json", "requests.csv"),
        _always("the monitoring itself, and informing the provider, are not shown here"),
    ),
    Requirement(
        f"{EU}, Art. 12(3)",
        "remote biometric identification: fields of their own",
        (),
        _always("not recorded: these fields are unknown to this system"),
    ),
    Requirement(
        f"{EU}, Art. 19(1)", "providers keep the logs they control at least six months", ("retention.json",), _kept
    ),
    Requirement(
        f"{EU}, Art. 26(6)", "deployers keep the logs they control at least six months", ("retention.json",), _kept
    ),
    Requirement(
        f"{KR}, governance",
        "who decides and answers for what; risks are managed",
        ("changes.json", "policies/"),
        _people,
    ),
    Requirement(
        f"{KR}, legality",
        "rules that apply are known and built into the work",
        ("policies/", "refusals.csv"),
        _always("which law applies to a use is not shown here; policies show what was enforced"),
    ),
    Requirement(
        f"{KR}, auxiliary role",
        "people decide where it matters",
        ("requests.csv",),
        _always("what people did with an answer is unknown to a router"),
    ),
    Requirement(
        f"{KR}, reliability",
        "performance is measured and managed, bias is checked",
        ("inventory.json", "summary.json"),
        _reports,
    ),
    Requirement(
        f"{KR}, financial stability",
        "an emergency stop and a backup model stand ready",
        ("drills.json", "changes.json", "incidents.json"),
        _drilled,
    ),
    Requirement(
        f"{KR}, good faith",
        "customers' interests are protected",
        ("refusals.csv", "retention.json"),
        _always("what customers were told, and complaints, are not shown here"),
    ),
    Requirement(f"{KR}, security", "threats are found, assets protected", ("chain.json", "inventory.json"), _tamper),
)


def table(seen: Seen) -> str:
    """Markdown: requirement, files, gap."""
    rows = ["| requirement | what it asks, in short | files | gap |", "|---|---|---|---|"]
    for one in REQUIREMENTS:
        files = ", ".join(f"`{name}`" for name in one.files) or "none"
        rows.append(f"| {one.source} | {one.asks} | {files} | {one.gap(seen) or 'none known to this program'} |")
    return "\n".join(rows)
