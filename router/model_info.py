"""`/model/info`: the deployments a caller may use, in LiteLLM's shape, without secrets."""

from __future__ import annotations

from typing import Any

from router.deployments import Deployment, without_secrets


def model_info(deployment: Deployment, *, admin: bool) -> dict[str, Any]:
    """One entry of the list. Where an upstream stands (`api_base`) and what is sent to it is for admins."""
    params: dict[str, Any] = {"model": deployment.upstream_model}
    if deployment.litellm_params is not None:
        params = {"model": deployment.litellm_params.model}
        if admin:
            params = without_secrets(deployment.litellm_params.model_dump(mode="json", exclude_unset=True))
            params |= {name: _without_login(params[name]) for name in ("api_base", "base_url") if params.get(name)}
    known = deployment.model_info.model_dump(mode="json", exclude_none=True)
    return {
        "model_name": deployment.model_name,
        "litellm_params": params,
        "model_info": {
            **without_secrets(known),
            "id": deployment.id,
            "db_model": False,
            "mode": deployment.model_info.mode or "chat",
            **deployment.price.named(),
            "kind": deployment.kind,
            "transport": deployment.transport,
        },
    }


def _without_login(url: str) -> str:
    """`http://USER:PASSWORD@HOST/` names a secret as well."""
    scheme, mark, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}" if mark else url
