"""Loaded tiny models, made once for the session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import make_model
from workers.config import ModelConfig
from workers.loader import Loaded, Loader


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
