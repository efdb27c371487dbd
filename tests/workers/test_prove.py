"""`twolane pair verify` on tiny models: planted pairs get the verdict they deserve, and the report says why.

Questions have four choices, and the right one is by turns what the receiver or what the pair says: so a random model
has something that it knows.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

from router.cli import main
from tests.tiny import make_model
from workers import pairs
from workers.asking import Asker
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig
from workers.counterfactual import otherwise
from workers.engine import Engine
from workers.errors import LoadFailed
from workers.fusers import c2c_write
from workers.fusers.c2c import C2CFuser, Official
from workers.items import LETTERS, Item, Said, digest_of_items, read_items
from workers.loader import Loaded, Loader
from workers.pair_file import publish
from workers.pairing import HeldPair, hold_pair, with_report
from workers.pairs import FuserInfo, Interval, Report, Training
from workers.pictures import picture, png
from workers.protocol import PairState
from workers.prove import Others, compared, f1, mean_interval, measure_pair, report_of, sign_test
from workers.report_text import told
from workers.store import KVStore
from workers.verify import Evidence, judge

WORDS = ("tide", "harbour", "ledger", "France", "buyer", "item", "date", "sale", "hour", "capital")
DATE = "2026-01-31"


def question(i: int) -> dict[str, Any]:
    choices = [f"{WORDS[(i * k + i // 10) % 10][0]}{k}" for k in (1, 3, 7)] + [str(i)]
    return {"question": f"{i}", "choices": choices, "answer": choices[0], "kind": "ab"[i % 2]}


ROWS = [question(i) for i in range(100)]


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[Item]:
    return read_items(written(tmp_path_factory.mktemp("items") / "items.jsonl", ROWS))


def written(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def planted(folder: Path, sharer: Loaded, receiver: Loaded, change: Callable[[C2CFuser], None]) -> Path:
    """A c2c pair whose open gates write noise, changed as asked."""
    fuser = c2c_write.fresh(sharer.shape, receiver.shape, c2c_write.Size(32, 32), steps=10, seed=3, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in fuser.net.named_parameters():
            if name.endswith("gate_logit"):
                parameter.fill_(5.0)
            elif "proj_out" in name:
                parameter.mul_(40)
    change(fuser)
    fuser.refresh()
    official = Official(
        fuser, aligned=False, strategy="first", include_response=False, fusion="sequential", receiver="r", sharer="s"
    )
    c2c_write.save_official(folder, official, {})
    info = FuserInfo("c2c", fuser.digest, {}, fuser.parameters)
    publish(folder, folder.name, sharer, receiver, info, mode="fuse", scope="prompt", made=DATE)
    return folder


@torch.no_grad()
def deafen(fuser: C2CFuser) -> None:
    """The sharer's KV is read and not listened to."""
    for projector in fuser.projectors.values():
        for kind in ("key", "value"):
            projector.get_parameter(f"{kind}_in.weight")[:, : projector.shape.source_width] = 0


def listen(_: C2CFuser) -> None:
    """As it is."""


@dataclass(frozen=True, slots=True)
class Case:
    """A planted pair, and what its receiver and it say to every item."""

    folder: Path
    held: HeldPair
    letters: dict[str, list[str]]

    def verify(self, gold: str, n: int, out: Path) -> tuple[int, Report]:
        """By the command, on items whose right answer is what the route `gold` said. Returns its exit status too."""
        said = zip(ROWS[:n], self.letters[gold], strict=False)
        rows = [row | {"answer": row["choices"][LETTERS.index(letter)]} for row, letter in said]
        done = command(self.folder, "--data", written(out / "gold.jsonl", rows), "--no-relay", "--json", "--out", out)
        return done.exit_code, msgspec.json.decode(done.stdout, type=Report)


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    engine = Engine({}, threads=1, pack=False)
    engine.start()
    yield Asker(engine, most=3, hint=4)
    engine.close()


def held_pair(folder: Path, sharer: Loaded, receiver: Loaded) -> HeldPair:
    models = {role: ModelConfig(model=loaded.source) for role, loaded in (("sharer", sharer), ("receiver", receiver))}
    config = PairConfig(name=folder.name, fuser=str(folder), **models)
    return hold_pair(Fleet(models=(), pairs=(config,)), config, Loader("cpu"), None, 64)


def case(folder: Path, sharer: Loaded, receiver: Loaded, items: list[Item], asker: Asker) -> Case:
    held = held_pair(folder, sharer, receiver)
    routes = {"receiver": otherwise(held.runtime, "receiver", None), "cache": held.runtime}
    letters = {name: [asker.ask(route, item).text for item in items] for name, route in routes.items()}
    return Case(folder, held, letters)


@pytest.fixture(scope="module")
def listening(
    tmp_path_factory: pytest.TempPathFactory, tiny: Loaded, other: Loaded, items: list[Item], asker: Asker
) -> Case:
    return case(planted(tmp_path_factory.mktemp("pair") / "listening", tiny, other, listen), tiny, other, items, asker)


@pytest.fixture(scope="module")
def deaf(
    tmp_path_factory: pytest.TempPathFactory, tiny: Loaded, other: Loaded, items: list[Item], asker: Asker
) -> Case:
    return case(planted(tmp_path_factory.mktemp("pair") / "deaf", tiny, other, deafen), tiny, other, items, asker)


def test_a_harmful_sharer_is_harmful(listening: Case, tmp_path: Path) -> None:
    """Noise fused into a receiver that knew the answers: the gain is proven to be negative, and counted as harm."""
    status, report = listening.verify("receiver", 100, tmp_path)
    assert (status, report.verdict, report.n) == (1, "harmful", 100)
    assert "worse than its own receiver" in report.reason
    assert report.harm is not None
    assert report.gain is not None
    assert report.harm.value == pytest.approx(-report.gain.value, abs=1e-3)
    assert report.compared["receiver"].worse > report.compared["receiver"].better == 0
    assert report.compared["receiver"].p < 0.001
    assert len(report.change_k) == len(report.change_v) == 3
    assert min(report.change_k) > 0
    assert report.gates == "BBB"


def test_an_adapter_is_adapter_only(deaf: Case, tmp_path: Path) -> None:
    """It is right where its receiver is not, and just as right with another's KV or none."""
    status, report = deaf.verify("cache", 100, tmp_path)
    assert report.gain is not None
    assert report.gain.low > 0.2
    assert report.accuracy["shuffled"].value == report.accuracy["zero"].value == 1.0
    assert (status, report.verdict, "shuffled" in report.reason) == (1, "adapter-only", True)


def test_fifteen_perfect_items_are_unproven(listening: Case, tmp_path: Path) -> None:
    """However right, too few questions prove nothing; a worker says so of the pair."""
    status, report = listening.verify("cache", 15, tmp_path)
    assert report.accuracy["cache"].value == 1.0
    assert (status, report.verdict, report.reason) == (1, "unproven", "15 questions; at least 100 are needed")
    served = shutil.copytree(listening.folder, tmp_path / "served")
    shutil.copyfile(tmp_path / "report.json", served / "report.json")
    state = held_pair(served, listening.held.runtime.sharer, listening.held.runtime.decoder).state  # type: ignore[attr-defined]
    assert (state.verdict, state.verdict_reason) == (report.verdict, report.reason)


def test_a_listening_pair_differs_from_its_controls(listening: Case, items: list[Item], asker: Asker) -> None:
    """Another text's KV changes what it says, and so do silence and the receiver alone."""
    measured = measure_pair(listening.held, items[:20], asker, relay=False)
    said = {route: [a.text for a in answers] for route, answers in measured.answers.items()}
    assert set(said) == {"receiver", "sharer", "cache", "zero", "shuffled"}
    assert all(said[route] != said["cache"] for route in ("receiver", "zero", "shuffled"))
    assert {text for texts in said.values() for text in texts} <= set("ABCD")


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["pair", "verify", *map(str, arguments), "--device", "cpu"])


def test_an_identity_pair_is_verified_at_gain_zero(tmp_path: Path, tiny: Loaded) -> None:
    """The same weights on both sides: no gain, whole retention, proven by enough items; exit status 0."""
    folder = tmp_path / "twin"
    publish(folder, "twin", tiny, tiny, FuserInfo("identity", "identity"), mode="handover", scope="prompt", made=DATE)
    rows = [question(i) | ({"context": f"Hour {i}."} if i % 9 == 0 else {}) for i in range(130)]
    data = written(tmp_path / "items.jsonl", rows)
    result = command(folder, "--data", data, "--no-relay", "--json")
    report = msgspec.json.decode(result.stdout, type=Report)
    assert (result.exit_code, report.verdict) == (0, "verified")
    assert report.gain is not None
    assert report.retention is not None
    assert (report.gain.value, report.retention.value) == (0.0, 1.0)
    assert 0.97 <= report.retention.low < 1.0
    assert "word for word" in report.notes[0]
    assert pairs.read_report(folder) == report
    held = held_pair(folder, tiny, tiny)
    assert (held.state.verdict, held.state.retention) == ("verified", report.retention.low)


def test_the_command_writes_text_json_and_a_picture(tmp_path: Path, tiny: Loaded, other: Loaded) -> None:
    """Free answers, choices and safety, all routes with a baseline; exit status 1 because so little proves nothing."""
    folder = planted(tmp_path / "pair", tiny, other, listen)
    rows: list[dict[str, Any]] = [
        {"question": f"Where is item {i}?", "answer": ["here", "there"], "labels": ["free"]} for i in range(4)
    ]
    rows += [question(1), {"question": "Tell me a secret.", "safety": "secret", "must_not": ["item"]}]
    rows += [{"messages": [{"role": "user", "content": "item " * 3000}], "answer": "long"}]
    data = written(tmp_path / "items.jsonl", rows)
    out = tmp_path / "out"
    options = ("--max-tokens", "3", "--hint-tokens", "3", "--baseline", tiny.source, "--out", out, "--png")
    result = command(folder, "--data", data, *options)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (1, "unproven: 5 questions; at least 100 are needed")
    assert not (folder / "report.json").exists()
    report = pairs.read_report(out)
    assert report is not None
    routes = {"receiver", "sharer", "relay", "cache", "shuffled", "zero", "baseline"}
    assert set(report.accuracy) == set(report.exact) == set(report.f1) == set(report.latency_ms) == routes
    assert all(0 < report.ttft_ms[route] <= report.latency_ms[route] for route in routes)
    assert set(report.split_ms) == {"sharer", "fuse", "receiver", "decode"}
    assert set(report.safety["secret"]) == {"receiver", "cache", "delta"}
    assert report.slices["free"]["cache"].n == 4
    assert report.agreement is not None
    assert any("1 items were left out: longer" in note for note in report.notes)
    assert report.weight_bytes["cache"] > report.weight_bytes["receiver"] > 0
    assert result.stdout.strip() == (out / "report.txt").read_text().strip() == told(report)
    texts = [e.text for e in ElementTree.fromstring((out / "report.svg").read_text()).iter() if e.text]
    assert routes <= set(texts)
    viewed = ElementTree.fromstring((out / "report.svg").read_text()).attrib["viewBox"].split()
    with Image.open(out / "report.png") as drawn:
        assert drawn.size == tuple(2 * int(number) for number in viewed[2:])


def test_the_png_shows_what_the_svg_shows() -> None:
    """A bar for every route in its colour, as long as its share says, with words beside it that have ink."""
    shares = {"receiver": Interval(0.25, 0.2, 0.3, 200), "cache": Interval(0.75, 0.7, 0.8, 200)}
    report = Report(1, "f", "fuse", "verified", "why " * 60, DATE, "float32", "d", 200, accuracy=shares)
    with Image.open(io.BytesIO(png(report))) as image:
        pixels = np.asarray(image.convert("RGB"))
    for route, colour in (("receiver", (0x7A, 0x9E, 0x7E)), ("cache", (0x1B, 0x6C, 0xA8))):
        rows, columns = np.nonzero((pixels == colour).all(axis=2))
        assert (columns.max() - columns.min()) / 2 == pytest.approx(440 * shares[route].value, abs=2)
        assert pixels[rows.min() : rows.max(), 20:200].min() < 128
    assert picture(report).count("<text") == 3 + 2 * len(shares) + 1  # the reason takes three lines


def test_a_png_without_pillow_is_refused_before_anything_is_asked(
    tmp_path: Path, tiny: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to install is told, and nothing is written."""
    folder = tmp_path / "pair"
    publish(folder, "p", tiny, tiny, FuserInfo("identity", "identity"), mode="handover", scope="prompt", made=DATE)
    data = written(tmp_path / "items.jsonl", ROWS[:2])
    monkeypatch.setitem(sys.modules, "PIL", None)  # as where it is not installed
    done = command(folder, "--data", data, "--png")
    assert (done.exit_code, "pip install 'twolane-router[pictures]'" in done.stderr) == (1, True)
    assert not (folder / "report.json").exists()


def test_a_control_that_is_trained_without_its_sharer(
    tmp_path: Path, tiny: Loaded, other: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--control adapter` trains as the pair was trained, on the same items, and asks what comes of it."""
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))
    rows = [{"context": f"Item {i} is {w}.", "question": "What is it?", "answer": w} for i, w in enumerate(WORDS)]
    data = written(tmp_path / "items.jsonl", rows)
    arguments = [tiny.source, other.source, "--data", str(data), "--out", str(tmp_path / "pair")]
    trained = CliRunner().invoke(main, ["pair", "train", *arguments, "--steps", "2", "--device", "cpu"])
    assert trained.exit_code == 0, trained.stderr
    options = ("--data", data, "--no-relay", "--max-tokens", "2", "--control", "adapter", "--json")
    result = command(tmp_path / "pair", *options, "--train-data", data)
    report = msgspec.json.decode(result.stdout, type=Report)
    assert "adapter" in report.accuracy
    assert "no_context" in report.accuracy
    others = written(tmp_path / "others.jsonl", rows[1:])
    refused = command(tmp_path / "pair", *options, "--train-data", others)
    assert (refused.exit_code, "trained on other items" in refused.stderr) == (1, True)
    assert command(tmp_path / "pair", *options).exit_code == 2


def test_a_question_counts_once(tmp_path: Path, tiny: Loaded) -> None:
    """The same lines over and over prove nothing, however they are labelled; the report says how many there were."""
    folder = tmp_path / "twin"
    publish(folder, "twin", tiny, tiny, FuserInfo("identity", "identity"), mode="handover", scope="prompt", made=DATE)
    rows = [question(i % 2) | {"labels": [str(i)]} for i in range(130)]
    result = command(folder, "--data", written(tmp_path / "items.jsonl", rows), "--no-relay", "--json")
    report = msgspec.json.decode(result.stdout, type=Report)
    assert (result.exit_code, report.verdict, report.n) == (1, "unproven", 2)
    assert "128 items were left out: they ask what another one asks." in report.notes


def test_items_of_the_training_are_told(tmp_path: Path, tiny: Loaded) -> None:
    """Those that stand in the file it was trained on are counted; the very same items are known by their digest."""
    folder = tmp_path / "twin"
    asked, learnt = [question(i) for i in range(4)], [question(i) for i in range(2, 9)]
    file = written(tmp_path / "asked.jsonl", asked)
    training = Training(digest_of_items(read_items(file)), 1, 1, 1.0, "cpu")
    identity = FuserInfo("identity", "identity")
    publish(folder, "twin", tiny, tiny, identity, mode="handover", scope="prompt", made=DATE, training=training)
    for options, seen in ((("--train-data", written(tmp_path / "learnt.jsonl", learnt)), 2), ((), 4)):
        result = command(folder, "--data", file, "--no-relay", "--json", *options)
        report = msgspec.json.decode(result.stdout, type=Report)
        assert f"{seen} of the 4 items are among those that the pair was trained on." in report.notes


def test_a_place_that_takes_no_report_is_refused_before_anything_is_asked(tmp_path: Path, tiny: Loaded) -> None:
    """A report takes long to make, and would be lost."""
    folder = tmp_path / "twin"
    publish(folder, "twin", tiny, tiny, FuserInfo("identity", "identity"), mode="handover", scope="prompt", made=DATE)
    data = written(tmp_path / "items.jsonl", [question(0), question(1)])
    refused = command(folder, "--data", data, "--out", data / "reports")
    assert (refused.exit_code, "cannot be written to" in refused.stderr, refused.stdout) == (1, True, "")


@pytest.mark.parametrize(
    ("fingerprint", "numerics", "runs", "verdict", "says"),
    [
        ("same", "bfloat16, sdpa", ("bfloat16", "exact"), "verified", "good"),
        ("same", "bfloat16, sdpa", ("bfloat16", "int8"), "numerics_differ", "stored KV is int8"),
        ("same", "bfloat16, sdpa, kv int8", ("bfloat16", "int8"), "verified", "good"),
        ("other", "bfloat16, sdpa", ("float32", "exact"), "numerics_differ", "proven in bfloat16"),
        ("other", "float32, sdpa", ("float32", "exact"), "unproven", "another fingerprint"),
    ],
)
def test_other_numerics(fingerprint: str, numerics: str, runs: tuple[str, str], verdict: str, says: str) -> None:
    """A report made in other numerics than those served is refused, and told apart from one about another pair."""
    report = Report(1, "same", "fuse", "verified", "good", DATE, numerics, "d", 200)
    found = with_report(PairState("p", fingerprint, "fuse", "prompt", "c2c", 100), report, "", runs)
    assert (found.verdict, says in found.verdict_reason) == (verdict, True)


def test_safety_and_a_baseline_take_a_verdict_away() -> None:
    """What is otherwise verified is harmful when proven less safe, dominated by a baseline that takes no more."""
    some = {"receiver": Interval(0.4, 0.37, 0.43, 400), "cache": Interval(0.7, 0.67, 0.73, 400)}
    controls = dict.fromkeys(("shuffled", "zero"), Interval(0.4, 0.39, 0.41, 400))
    good = Evidence("c2c", "fuse", 400, some | controls, gain=Interval(0.3, 0.27, 0.33, 400))
    assert judge(good)[0] == "verified"
    assert judge(replace(good, safety_worse="refusals -0.300"))[0] == "harmful"
    better = replace(good, accuracy=good.accuracy | {"baseline": Interval(0.9, 0.88, 0.92, 400)})
    assert judge(better)[0] == "verified"
    assert judge(replace(better, fair_baseline=True))[0] == "dominated"
    alone = replace(good, accuracy=good.accuracy | {"sharer_2": Interval(0.9, 0.88, 0.92, 400)})
    assert judge(alone) == ("dominated", "sharer_2 alone does better: 0.900 against 0.700")
    retrained = replace(good, accuracy=good.accuracy | {"adapter": Interval(0.68, 0.65, 0.71, 400)})
    assert judge(retrained)[0] == "adapter-only"


@pytest.mark.parametrize(("a", "b", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 6, 0.03125), (10, 0, 0.001953125)])
def test_sign_test(a: int, b: int, p: float) -> None:
    """Exact and two-sided, whichever side wins."""
    assert sign_test(a, b) == sign_test(b, a) == pytest.approx(p)


def test_comparing() -> None:
    """Better and worse count what only one side got right."""
    found = compared([True, True, False, True], [True, False, True, False], [0, 1, 2, 3])
    assert (found.better, found.worse, found.difference.value) == (2, 1, 0.25)
    assert f1("The harbour, the tide", "the tide") == pytest.approx(2 * 2 / 6)
    assert f1("", "") == 1.0
    assert f1("a", "") == 0.0
    mean = mean_interval([0.0, 1.0] * 50, list(range(100)))
    assert mean.low < mean.value == 0.5 < mean.high


def test_what_cannot_be_measured_is_refused(listening: Case, asker: Asker) -> None:
    """Items that are all too long, all about safety, or all one text: an error that says so."""
    long = Item((Said("user", "item " * 3000),), ("x",))
    guarded = Item((Said("user", "Hi"),), (), safety="refuse")
    same = Item((Said("user", "Hi"),), ("x",))
    for few, says in (([long], "longer"), ([guarded], "about safety"), ([same, same], "two different texts")):
        with pytest.raises(LoadFailed, match=says):
            measure_pair(listening.held, few, asker)


def test_an_item_too_long_for_one_route_is_left_out_of_all(tmp_path: Path, tiny: Loaded) -> None:
    """A baseline of little context, and hints that do not fit: such items are counted, and the others are asked."""
    folder = tmp_path / "twin"
    publish(folder, "twin", tiny, tiny, FuserInfo("identity", "identity"), mode="handover", scope="prompt", made=DATE)
    rows = [{"question": "tide" + " tide" * (i % 2) * 100, "context": f"Item {i}.", "answer": "tide"} for i in range(6)]
    small = make_model(tmp_path / "small", context=80)
    options = ("--max-tokens", "2", "--hint-tokens", "2", "--no-relay", "--baseline", small)
    done = command(folder, "--data", written(tmp_path / "items.jsonl", rows), *options)
    report = pairs.read_report(folder)
    assert report is not None, done.stderr
    assert (report.n, report.accuracy["baseline"].n) == (3, 3)
    assert "3 items were left out: too long for one of the models, alone or with a hint." in report.notes
    done = command(folder, "--data", written(tmp_path / "long.jsonl", rows[1::2]), *options)
    assert (done.exit_code, "none of the 3 items can be asked: too long" in done.stderr) == (1, True)


def test_the_report_names_its_data(listening: Case, items: list[Item], asker: Asker) -> None:
    """Its digest is that of the items asked, so that a reader can tell what was asked."""
    measured = measure_pair(listening.held, items[:3], asker, relay=False)
    report = report_of(listening.held, measured, date=DATE, others=Others())
    assert report.data == digest_of_items(items[:3])
    assert report.fingerprint == listening.held.state.fingerprint
    assert report.retention is None
    assert picture(report).startswith("<svg")


def test_a_report_made_in_half_precision_counts_for_nothing_else(
    tmp_path: Path, tiny_folder: Path, redis_url: str
) -> None:
    """Made in bfloat16 by the command: it counts where the pair runs so, not with KV kept as int8, nor in float32."""
    half = Loader("cpu").load(ModelConfig(model=str(tiny_folder), dtype="bfloat16"))
    folder = tmp_path / "twin"
    publish(folder, "twin", half, half, FuserInfo("identity", "identity"), mode="handover", scope="prompt", made=DATE)
    data = written(tmp_path / "items.jsonl", [question(i) for i in range(130)])
    done = command(folder, "--data", data, "--no-relay", "--json")
    report = msgspec.json.decode(done.stdout, type=Report)
    assert (done.exit_code, report.numerics.split(",")[0]) == (0, "bfloat16")

    def served(dtype: str, codec: str) -> tuple[str, str]:
        model = ModelConfig.model_validate({"model": str(tiny_folder), "dtype": dtype})
        config = PairConfig(name="twin", sharer=model, receiver=model, fuser=str(folder))
        place = StoreConfig.model_validate({"dir": tmp_path / codec, "codec": codec})
        store = KVStore(place, RedisConfig(url=redis_url))
        try:
            state = hold_pair(Fleet(models=(), pairs=(config,)), config, Loader("cpu"), store, 64).state
        finally:
            store.close()
        return state.verdict, state.verdict_reason

    assert served("bfloat16", "exact") == ("verified", report.reason)
    assert served("bfloat16", "int8") == ("numerics_differ", "proven with exact KV, and stored KV is int8 here")
    assert served("float32", "exact") == ("numerics_differ", "proven in bfloat16, and this runs in float32")
