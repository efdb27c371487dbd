"""TWOLANE_* variables over the configuration: `TWOLANE_SERVER__PORT=8080`. Values of lists and mappings are JSON.

Imported only where such a variable is set: pydantic-settings takes a tenth of the start and 4 MB.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from router.settings import PREFIX, Settings
from router.source import ConfigError


class _WithVariables(Settings, BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Variables win over the file."""
        return env_settings, init_settings


def with_variables(data: dict[str, Any]) -> Settings:
    """The settings that data and variables make together. Raises ConfigError for a variable that is no JSON.

    Raises ValidationError like `Settings`.
    """
    try:
        return _WithVariables(**data)
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        name = f"{PREFIX}{field[1].upper()}" if field else f"{PREFIX}…"
        raise ConfigError(f"environment variable {name}: expected JSON") from None
