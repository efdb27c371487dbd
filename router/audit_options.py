"""Which log a command of `twolane audit` means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


def which_log(command: _F) -> _F:
    """`--dir`, or the folder that a configuration file names."""
    folder = click.option(
        "--dir",
        "root",
        envvar="TWOLANE_AUDIT_DIR",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Folder of the audit log.",
    )
    config = click.option(
        "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Or its config."
    )
    return folder(config(command))


def log_folder(root: Path | None, config: Path | None) -> Path:
    """The log that the options name."""
    if root is not None:
        return root
    if config is None:
        raise click.UsageError("say which log: --dir FOLDER or --config FILE")
    from router import settings
    from router.source import ConfigError

    try:
        folder = settings.load(config).audit.dir
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    if not folder.is_dir():
        raise click.ClickException(f"{folder}: there is no audit log; a router writes it when it runs")
    return folder
