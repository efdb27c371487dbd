"""Aligned chats held to the vectors of the official code: `workers.conform` where tokenizers are looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from workers.align import Aligned, Aligner, Mode
from workers.align_official import OfficialAligner
from workers.c2c_run import sections_of
from workers.conform_checks import Cases, Checks
from workers.errors import BadPrompt


def json_of(file: Path) -> Any:
    """What a file of vectors says. Raises OSError, ValueError."""
    return json.loads(file.read_text())


def aligned_prompt(checks: Checks, place: Path, expected: dict[str, Any]) -> None:
    receiver, sharer = (_tokenizer(place / name) for name in ("receiver", "sharer"))
    mode = _mode(expected["kwargs"])
    thinking = expected["kwargs"].get("enable_thinking")
    aligner = OfficialAligner(receiver, sharer, expected["strategy"])
    aligned = aligner.align(expected["messages"], mode, enable_thinking=thinking)
    checks.same("receiver_text", aligned.receiver_text, expected["receiver_text"])
    checks.same("sharer_text", aligned.sharer_text, expected["sharer_text"])
    checks.same("sections_named", [[p.kind, [p.start, p.stop]] for p in aligned.parts], expected["sections_named"])
    for role, padding in (("receiver", aligned.receiver_padding), ("sharer", aligned.sharer_padding)):
        checks.same(f"{role}_pad_count", sum(padding), expected.get(f"{role}_pad_count", sum(padding)))
    codes = [[s.code, s.length] for s in sections_of(aligned.codes)]
    for run, facts in expected["runs"].items():
        checks.same(f"sections of {run}", codes, facts["sections"])
        tensors = load_file(place / f"expected_{run}.safetensors")
        checks.same("receiver ids", list(aligned.receiver_ids), tensors["input_ids.receiver"][0].tolist())
        checks.same("sharer ids", list(aligned.sharer_ids), tensors["input_ids.sharer"][0].tolist())
        for role, padding in (("receiver", aligned.receiver_padding), ("sharer", aligned.sharer_padding)):
            checks.same(f"{role} mask", [int(not p) for p in padding], tensors[f"attention_mask.{role}"][0].tolist())
        checks.same("positions", list(range(len(aligned.receiver_ids))), tensors["position_ids"][0].tolist())


def _mode(kwargs: dict[str, Any]) -> Mode:
    """What the official aligner's arguments ask for."""
    if kwargs.get("remove_last_surfix"):
        return "logits"
    return "generate" if kwargs.get("add_generation_prompt") else "train"


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def alignment(cases: Cases, folder: Path) -> None:
    loaded: dict[str, Any] = {}
    if folder.is_dir() and not any((folder / name).exists() for name in ("cases.json", "every_token.json")):
        cases.broken("alignment", "neither cases.json nor every_token.json is there")

    def tokenizer(name: str) -> Any:
        if name not in loaded:
            loaded[name] = _tokenizer(folder / name if "/" in name else folder / "tokenizers" / name)
        return loaded[name]

    for row in _rows(cases, folder / "cases.json", "cases"):
        label = " ".join(str(row.get(key)) for key in ("case", "sharer_tokenizer", "strategy", "mode"))
        with cases.case(f"alignment/{label}") as checks:
            aligner = OfficialAligner(tokenizer("receiver"), tokenizer(row["sharer_tokenizer"]), row["strategy"])
            _aligned_case(checks, aligner, row)
    for row in _rows(cases, folder / "every_token.json", "runs"):
        with cases.case(f"alignment/every_token {row.get('strategy')}") as checks:
            one = Aligner(tokenizer("receiver"), tokenizer(row.get("sharer_tokenizer", "sharer")), row["strategy"])
            checks.same("sharer_ids", [one.convert(i) for i in row["receiver_ids"]], row["sharer_ids"])
            found = [list(one.candidates(i)) for i in row["receiver_ids"]]
            checks.same("candidates", found, row.get("candidates", found))


def _rows(cases: Cases, file: Path, key: str) -> list[dict[str, Any]]:
    """The vectors of a file; none where it is not there. One that holds no vectors is a broken case."""
    if not file.exists():
        return []
    try:
        held = json_of(file)
    except ValueError as error:
        cases.broken(f"alignment/{file.stem}", f"not JSON: {error}")
        return []
    rows = held.get(key) if isinstance(held, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        cases.broken(f"alignment/{file.stem}", f"{key} must be a list of objects, with one at least")
        return []
    return rows


def _aligned_case(checks: Checks, aligner: Aligner, row: dict[str, Any]) -> None:
    checks.same("mode", row["mode"], _mode(row["kwargs"]))
    try:
        aligned = aligner.align(row["messages"], row["mode"], enable_thinking=row["kwargs"].get("enable_thinking"))
    except BadPrompt as error:
        checks.same(f"refused ({error})", "error" in row, True)
        return
    checks.same("refused", "error" in row, False)
    want = row.get("result", {})
    for name, got in _as_official(aligned).items():
        checks.same(name, got, want.get(name))
    if "train_labels" in row:
        checks.same("train_labels", list(aligned.labels), row["train_labels"])
    if "train_kv_cache_index_code" in row:
        checks.same("train_kv_cache_index_code", list(aligned.codes), row["train_kv_cache_index_code"])


def _as_official(aligned: Aligned) -> dict[str, Any]:
    return {
        "slm_ids_padded": list(aligned.receiver_ids),
        "llm_ids_padded": list(aligned.sharer_ids),
        "message_mask": [int(m) for m in aligned.message_mask],
        "slm_padding_mask": [int(m) for m in aligned.receiver_padding],
        "llm_padding_mask": [int(m) for m in aligned.sharer_padding],
        "sections": [{"type": p.kind, "range": [p.start, p.stop]} for p in aligned.parts],
        "slm_text": aligned.receiver_text,
        "llm_text": aligned.sharer_text,
    }
