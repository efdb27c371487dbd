"""Every kind of fuser in every mode and scope: served over HTTP, or refused at load with the reason."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.tiny import SENTENCES, tokenizer
from tests.workers.test_official_runtime import ALIGNED, SAME, recipe, with_tokenizers
from tests.workers.test_server import serving
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.fit_linear import Recipe, encoded, fit
from workers.fusers.lite import LiteShape, copied_layers, fresh
from workers.loader import Loader
from workers.pair_file import publish
from workers.pairs import FuserInfo

MODES, SCOPES = ("fuse", "handover"), ("prompt", "context")
BOTH = {"fuse": "", "handover": ""}
KINDS: dict[str, dict[str, str]] = {
    "identity": {"fuse": "an identity pair runs in mode handover, not fuse", "handover": ""},
    "lite": {"fuse": "a lite fuser runs in mode handover, not fuse", "handover": ""},
    "linear": BOTH,
    "c2c": {"fuse": "", "handover": "a c2c fuser runs in mode fuse, not handover"},
    "response": {"fuse": "", "handover": "a c2c fuser runs in mode fuse, not handover"},
    "aligned": {"fuse": "", "handover": "a c2c fuser runs in mode fuse, not handover"},
}
"""By kind and mode, why it is refused; nothing where it is served."""
MESSAGES = [
    {"role": "system", "content": "The tide table of the harbour, hour by hour."},
    {"role": "user", "content": "What is the capital of France?"},
]


def expected(kind: str, mode: str, scope: str) -> str:
    if (kind, mode, scope) == ("aligned", "fuse", "context"):
        return "its scope is prompt, not context"
    return KINDS[kind][mode]


def fusers(folder: Path, tiny: Path) -> dict[str, tuple[str, str, str]]:
    """Sharer, receiver and fuser of a tiny pair, by kind."""
    loader = Loader("cpu")
    whole, cut = ModelConfig(model=str(tiny)), ModelConfig(model=str(tiny), layers=(0, 2))
    sharer, receiver = loader.load(whole), loader.load(cut)
    lite = fresh(LiteShape(sharer.shape, receiver.shape, copied_layers(sharer.shape, receiver.shape, (0, 2)), 4),
                 receiver.dtype, 0).save(folder / "lite")  # fmt: skip
    info = FuserInfo("lite", lite.digest, lite.shape.as_json(), lite.parameters)
    publish(folder / "lite", "lite", sharer, receiver, info, mode="handover", scope="prompt", made="2026-01-01")
    fitted = fit(sharer, receiver, encoded(sharer.tokenizer, SENTENCES * 12), Recipe(tokens=600, scout=200))
    fitted.publish(folder / "linear", "linear", sharer, receiver, mode="handover", scope="prompt", made="2026-01-01")
    recipe(folder, SAME / "fuser", include_response=True)
    return {
        "identity": ("tiny", "tiny", "identity"),
        "lite": ("tiny", "cut", str(folder / "lite")),
        "linear": ("tiny", "cut", str(folder / "linear")),
        "c2c": ("same-sharer", "same-receiver", str(SAME / "fuser")),
        "response": ("same-sharer", "same-receiver", str(folder / "fuser")),
        "aligned": ("aligned-sharer", "aligned-receiver", str(ALIGNED / "fuser")),
    }


async def test_every_combination_is_served_or_refused_with_the_reason(tiny_folder: Path, tmp_path: Path) -> None:
    """Six kinds, two modes, two scopes: each answers a chat about a document, or says at load why it cannot."""
    same = with_tokenizers(tmp_path)
    for role in ("sharer", "receiver"):  # with a template whose beginning does not depend on what follows
        tokenizer(150, ascii_only=True).save_pretrained(same / role)
    parties = fusers(tmp_path, tiny_folder)
    places = {"tiny": tiny_folder, "cut": tiny_folder} | {
        f"{place}-{role}": root / role
        for (place, root), role in itertools.product((("same", same), ("aligned", ALIGNED)), ("sharer", "receiver"))
    }
    combinations = list(itertools.product(KINDS, MODES, SCOPES))
    fleet = Fleet(
        models=tuple(
            ModelConfig(name=name, model=str(at), layers=(0, 2) if name == "cut" else None)
            for name, at in places.items()
        ),
        pairs=tuple(
            PairConfig(name="-".join(c), sharer=s, receiver=r, fuser=f, mode=c[1], scope=c[2])  # type: ignore[arg-type]
            for c in combinations
            for s, r, f in [parties[c[0]]]
        ),
        workers=(WorkerConfig(name="w", pairs=tuple("-".join(c) for c in combinations)),),
        redis=RedisConfig(url=f"unix://{tmp_path}/no-redis.sock"),
        store=StoreConfig(dir=None),
    )
    async with serving(fleet, tmp_path / "w.sock") as (client, worker):
        states = {state.name: state for state in worker.state().pairs}
        for kind, mode, scope in combinations:
            name, why = f"{kind}-{mode}-{scope}", expected(kind, mode, scope)
            body = {"model": name, "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-twolane-tenant": "a"})
            if why:
                assert why in states[name].reason, name
                assert not states[name].ready, name
                assert answer.status_code == 404, name
                assert why in answer.json()["error"]["message"], name
                continue
            assert (states[name].ready, states[name].mode, states[name].scope) == (True, mode, scope), name
            assert answer.status_code == 200, (name, answer.text)
            assert answer.json()["usage"]["completion_tokens"] == 4, name
        served = [state.fingerprint for state in states.values() if state.ready]
    assert len(set(served)) == len(served) == 13
