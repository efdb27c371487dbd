"""Loaded tiny models, made once for the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_model
from workers.config import ModelConfig, RedisConfig, StoreConfig
from workers.embedded import EmbeddedRedis
from workers.loader import Loaded, Loader
from workers.store import KVStore


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Loaded:
    return Loader("cpu").load(ModelConfig(name="tiny", model=str(tiny_folder)))


@pytest.fixture(scope="session")
def other(other_folder: Path) -> Loaded:
    return Loader("cpu").load(ModelConfig(name="other", model=str(other_folder)))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def store(tmp_path: Path, redis_url: str) -> Iterator[KVStore]:
    opened = KVStore(StoreConfig(dir=tmp_path / "kv"), RedisConfig(url=redis_url))
    yield opened
    opened.close()
