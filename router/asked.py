"""What a request may use, as far as it tells: for what must be reserved before anything is asked of an upstream.

Reads requests, of JSON and forms; knows no prices and no deployments. What cannot be read is the upstream's to refuse.
"""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec

from policies.facts import Facts
from router.call import Call
from router.prices import USUAL_SIZE, Asked
from router.upload import Upload
from router.wire import MOST

BYTES_PER_S = 4000
"""Of sound that is sent to be heard, and whose length nobody tells: speech at 32 kbit/s, which is seldom longer."""
CHARACTERS_PER_S = 10
"""Of text that is to be spoken: a slow speaker."""
MOST_IMAGES = 10
"""Reserved where a form's `n` stands behind what was read of it, and where it is no number."""
_SIZE = re.compile(r"\s*(\d{1,5})\s*[x*]\s*(\d{1,5})\s*\Z")
_OPEN = frozenset({"", "auto"})
_value = msgspec.json.Decoder(str | int | float | bool | None)
_prompts = msgspec.json.Decoder(list[msgspec.Raw])


def asked(call: Call, facts: Facts) -> Asked:
    """The most that an answer may use, where the request bounds it, else what is usual."""
    quality, size = picture(call) if call.path.startswith("/images") else ("", "")
    return Asked(
        prompt_tokens=facts.prompt_tokens,
        completion_tokens=facts.output_tokens * answers(call),
        kinds=_kinds(call, facts),
        counted=_counted(call, size),
        quality=quality,
        size=size,
        tier=tier(call) or "",
    )


def answers(call: Call) -> int:
    """How many answers are written: `n` to each prompt."""
    found = 1
    if call.raw is None and "n" in call.fields:
        found = _whole(_text(call, "n"), 1)
    if call.path == "/completions":
        if "best_of" in call.fields:
            found = max(found, _whole(_text(call, "best_of"), 1))
        with suppress(msgspec.DecodeError):  # one prompt as text
            prompts = _prompts.decode(call.fields.get("prompt", b"[]"))
            found *= max(1, sum(bytes(prompt)[:1] in (b'"', b"[") for prompt in prompts))
    return found


def picture(call: Call) -> tuple[str, str]:
    """Quality and size of the images, each empty where it is left open."""
    quality, size = (_text(call, name).strip().lower() for name in ("quality", "size"))
    return "" if quality in _OPEN else quality, "" if size in _OPEN else size


def pixels(size: str) -> int | None:
    """Of one image; None for a size that is none."""
    found = _SIZE.match(size or USUAL_SIZE)
    return None if found is None else int(found[1]) * int(found[2])


def characters(call: Call) -> int:
    """Of the text that is to be spoken."""
    return len(_text(call, "input")) if call.path == "/audio/speech" else 0


def searches(call: Call) -> dict[str, float]:
    """One, where the request lets the model search."""
    fields = call.fields
    if "web_search_options" in fields or ("tools" in fields and b'"web_search' in bytes(fields["tools"])):
        return {"searches_medium": 1}
    return {}


def tier(call: Call) -> str | None:
    """The service tier that is asked for."""
    return _text(call, "service_tier") or None if "service_tier" in call.fields else None


def _kinds(call: Call, facts: Facts) -> frozenset[str]:
    kinds = {"reasoned", "stored"}
    if any(b'"1h"' in bytes(raw) for raw in call.fields.values()):
        kinds.add("stored_1h")
    if "audio" in facts.needs or call.path.startswith("/audio"):
        kinds |= {"heard", "spoken"}
    if "images" in facts.needs or call.path.startswith("/images"):
        kinds |= {"seen", "drawn"}
    if b"image" in bytes(call.fields.get("modalities", b"")):
        kinds.add("drawn")
    return frozenset(kinds)


def _counted(call: Call, size: str) -> dict[str, float]:
    if call.raw is None:
        return searches(call)
    if call.path.startswith("/images"):
        images = _images(call)
        return {"images": images, "pixels": images * (pixels(size) or 0)}
    if said := characters(call):
        return {"characters": said, "seconds": said / CHARACTERS_PER_S}
    if call.path.startswith("/audio"):
        return {"seconds": _seconds(call)}
    return {}


def _images(call: Call) -> int:
    upload = _upload(call)
    if upload is None:
        return _whole(_text(call, "n") or "1", MOST_IMAGES)
    if "n" not in upload.fields and upload.whole:
        return 1
    return _whole(upload.fields.get("n", ""), MOST_IMAGES)


def _seconds(call: Call) -> float:
    for name in ("seconds", "duration"):
        try:
            if (told := float(_text(call, name) or 0)) > 0:
                return told
        except ValueError:  # not a number
            continue
    upload = _upload(call)
    return 0.0 if upload is None else upload.most / BYTES_PER_S


def _upload(call: Call) -> Upload | None:
    return None if call.raw is None else call.raw.upload


def _text(call: Call, name: str) -> str:
    """A field of JSON or of the form, as text; empty where it is not there, or is neither text nor a number."""
    upload = _upload(call)
    if upload is not None:
        return upload.fields.get(name, "")
    raw = call.fields.get(name)
    if raw is None:
        return ""
    try:
        value = _value.decode(raw)
    except msgspec.DecodeError:
        return ""
    return "" if value is None or isinstance(value, bool) else str(value)


def _whole(said: str, otherwise: int) -> int:
    try:
        return min(max(1, int(float(said))), MOST)
    except (ValueError, OverflowError):
        return otherwise
