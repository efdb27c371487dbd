"""A provider with every door that clients know, in OpenAI's shapes: what stands behind the router in these tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bergen"}'}}
FILE = {
    "id": "file-1",
    "object": "file",
    "bytes": 5,
    "created_at": 1,
    "filename": "a.jsonl",
    "purpose": "batch",
    "status": "processed",
}
BATCH = {
    "id": "batch_1",
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "input_file_id": "file-1",
    "completion_window": "24h",
    "status": "validating",
    "created_at": 1,
}


def _json(body: object, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def _error(status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return web.json_response(body, status=status, headers={name.replace("_", "-"): v for name, v in headers.items()})


async def _events(request: web.Request, events: list[tuple[str, dict[str, Any]]], done: bool) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for name, event in events:
        head = f"event: {name}\n" if name else ""
        await response.write(f"{head}data: {json.dumps(event)}\n\n".encode())
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


async def chat(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    match body["model"]:
        case "busy":
            return _error(429, "slow down", "rate_limit_exceeded", retry_after="0")
        case "broken":
            return _error(500, "boom")
        case "long":
            return _error(400, "This model's maximum context length is 8 tokens.", "context_length_exceeded")
        case "slow":
            await asyncio.sleep(30)
    head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    message: dict[str, Any] = {"role": "assistant", "content": "hello there"}
    if body.get("tools"):
        message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    elif body.get("response_format"):
        message["content"] = '{"city":"Bergen"}'
    finish = "tool_calls" if body.get("tools") else "stop"
    if not body.get("stream"):
        count = body.get("n") or 1
        choices = [{"index": i, "message": message, "finish_reason": finish, "logprobs": None} for i in range(count)]
        return _json({**head, "object": "chat.completion", "choices": choices, "usage": USAGE})
    deltas = [{"role": "assistant", "content": ""}, {"content": "hello "}, {"content": "there"}]
    if body.get("tools"):
        deltas = [{"role": "assistant", "tool_calls": [{"index": 0, **CALL}]}]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    events: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({"choices": [], "usage": USAGE})
    return await _events(request, [("", {**head, "object": "chat.completion.chunk", **e}) for e in events], True)


async def completions(request: web.Request) -> web.StreamResponse:
    choice = {"index": 0, "text": "hello", "finish_reason": "stop", "logprobs": None}
    return _json(
        {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    )


async def embeddings(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    wants_base64 = body.get("encoding_format") == "base64"
    value: object = "AACAPwAAAEA=" if wants_base64 else [1.0, 2.0]
    data = [{"object": "embedding", "index": i, "embedding": value} for i in range(len(texts))]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    return _json({"object": "list", "data": data, "model": body["model"], "usage": usage})


async def responses(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    part = {"type": "output_text", "text": "hello there", "annotations": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    usage = {
        "input_tokens": 3,
        "output_tokens": 2,
        "total_tokens": 5,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    done = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": body["model"],
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }
    if not body.get("stream"):
        return _json(done)
    begun = {**done, "status": "in_progress", "output": [], "usage": None}
    delta = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
    events = [
        ("response.created", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": {**item, "status": "in_progress", "content": []}}),
        ("response.content_part.added", {**delta, "part": {**part, "text": ""}}),
        ("response.output_text.delta", {**delta, "delta": "hello "}),
        ("response.output_text.delta", {**delta, "delta": "there"}),
        ("response.completed", {"response": done}),
    ]
    numbered = [(name, {"type": name, "sequence_number": i, **e}) for i, (name, e) in enumerate(events)]
    return await _events(request, numbered, False)


async def files(request: web.Request) -> web.StreamResponse:
    if request.method == "POST":
        form = await request.post()
        sent = form["file"]
        assert isinstance(sent, web.FileField)
        return _json({**FILE, "bytes": len(sent.file.read()), "filename": sent.filename, "purpose": form["purpose"]})
    return _json({"object": "list", "data": [FILE], "has_more": False, "first_id": "file-1", "last_id": "file-1"})


async def file(request: web.Request) -> web.StreamResponse:
    if request.match_info["id"] != "file-1":
        return _error(404, f"No such File object: {request.match_info['id']}")
    if request.method == "DELETE":
        return _json({"id": "file-1", "object": "file", "deleted": True})
    return _json(FILE)


async def content(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b'{"custom_id":"1"}\n', content_type="application/octet-stream")


async def batches(request: web.Request) -> web.StreamResponse:
    return _json(BATCH)


async def speech(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"ID3\0\1", content_type="audio/mpeg")


async def transcriptions(request: web.Request) -> web.StreamResponse:
    form = await request.post()
    assert isinstance(form["file"], web.FileField)
    said = f"{form['model']} heard {len(form['file'].file.read())} bytes"
    return _json({"text": said, "usage": {"type": "tokens", "input_tokens": 9, "output_tokens": 2, "total_tokens": 11}})


async def images(request: web.Request) -> web.StreamResponse:
    return _json({"created": 1, "data": [{"b64_json": "aGk="}]})


@contextlib.asynccontextmanager
async def provider() -> AsyncIterator[str]:
    """Its base address."""
    app = web.Application(client_max_size=64 * 2**20)
    add = app.router.add_route
    for method, path, answer in [
        ("POST", "/chat/completions", chat),
        ("POST", "/completions", completions),
        ("POST", "/embeddings", embeddings),
        ("POST", "/responses", responses),
        ("*", "/files", files),
        ("GET", "/files/{id}/content", content),
        ("*", "/files/{id}", file),
        ("*", "/batches", batches),
        ("*", "/batches/{rest:.*}", batches),
        ("POST", "/audio/speech", speech),
        ("POST", "/audio/transcriptions", transcriptions),
        ("POST", "/images/generations", images),
        ("POST", "/images/edits", images),
    ]:
        add(method, f"/v1{path}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
