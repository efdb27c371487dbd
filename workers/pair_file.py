"""Writes `pair.json` for models as they are loaded; the format is that of `workers.pairs`, which needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workers.errors import LoadFailed
from workers.loader import Loaded
from workers.pairs import FORMAT, FuserInfo, PairFile, Party, Training, is_plain, write


def publish(
    folder: Path,
    name: str,
    sharer: Loaded,
    receiver: Loaded,
    fuser: FuserInfo,
    *,
    mode: str,
    scope: str,
    made: str,
    licence: str | tuple[str | None, str | None] | None = None,
    data_licence: str | None = None,
    others: Sequence[Loaded] = (),
    training: Training | None = None,
) -> PairFile:
    """Write `pair.json`: the models by their digests, and the fuser. `licence` is that of all models, or the sharers'
    and the receiver's; `others` are the sharers after the first.
    """
    if not is_plain(name):
        raise LoadFailed(f"a pair cannot be called {name!r}: its name is that of a folder")
    theirs, ours = licence if isinstance(licence, tuple) else (licence, licence)
    pair = PairFile(
        format=FORMAT,
        name=name,
        mode=mode,
        scope=scope,
        sharer=_party(sharer, theirs),
        receiver=_party(receiver, ours),
        fuser=fuser,
        others=tuple(_party(model, theirs) for model in others),
        made=made,
        data_licence=data_licence,
        training=training,
    )
    write(folder, "pair.json", pair)
    return pair


def _party(loaded: Loaded, licence: str | None) -> Party:
    identity = loaded.identity
    return Party(
        model=loaded.source,
        weights=loaded.digests.weights,
        tokenizer=loaded.digests.tokenizer,
        template=loaded.digests.template,
        dtype=identity["dtype"],
        layers=identity["layers"],
        licence=licence,
    )
