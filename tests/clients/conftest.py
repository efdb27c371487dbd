from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.provider import provider
from tests.router.gateway import Router, router

MODELS = ("m", "busy", "broken", "long", "slow")


def entry(name: str, base: str) -> dict[str, Any]:
    params = {"model": f"openai/{name}", "api_base": base, "api_key": "sk-up-0123456789", "num_retries": 0}
    return {"model_name": name, "litellm_params": {**params, "timeout": 1} if name == "slow" else params}


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Router]:
    async with provider() as base:
        config = {"model_list": [entry(name, base) for name in MODELS]}
        async with router(tmp_path, config) as running:
            yield running
