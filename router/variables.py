"""TWOLANE_* variables over the configuration: `TWOLANE_SERVER__PORT=8080`. Values of lists and mappings are JSON.

Imported only where such a variable is set: pydantic-settings brings pydantic along.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings.exceptions import SettingsError

from router.layers import over
from router.settings import PREFIX, Settings
from router.source import ConfigError
from shapes.thorough import twin


def with_variables(data: dict[str, Any]) -> Settings:
    """The settings that data and variables make together. Raises ConfigError for a variable that is no JSON.

    Raises Invalid like `Settings`.
    """
    source = EnvSettingsSource(_named(), env_prefix=PREFIX, env_nested_delimiter="__")
    try:
        found = source()
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        name = f"{PREFIX}{field[1].upper()}" if field else f"{PREFIX}…"
        raise ConfigError(f"environment variable {name}: expected JSON") from None
    return Settings(**over(data, found))


@cache
def _named() -> type[BaseSettings]:
    """What pydantic-settings looks for: the keys of `Settings`."""
    return type("Variables", (twin(Settings), BaseSettings), {"__module__": __name__})
