"""What `twolane pair export` and `withdraw` have done, in the audit log: no router stands between them and a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from router.audit_chain import Chain, control
from router.audit_keys import ROUTER, AuditError, Signer
from workers.sealing import Done


def record(done: Any) -> None:
    """Put it into the router's chain, which running routers may be writing too. Other commands' results are let be.

    Ends with exit status 1 where it was done and could not be recorded.
    """
    if not isinstance(done, Done):
        return
    if done.audit is None:
        click.echo("not recorded: --audit FOLDER names the audit log of the routers that serve it", err=True)
        return
    try:
        _append(done.audit, done)
    except (AuditError, OSError) as error:
        raise click.ClickException(f"it is done, and not recorded: {error}") from error


def _append(root: Path, done: Done) -> None:
    chain = Chain(root, ROUTER, Signer.load(root))
    for failed in chain.append([control(done.what, done.by, done.detail)]):
        if failed is not None:
            raise AuditError(str(failed)) from failed
    chain.close()
