"""Facts of a request without a running router: for `twolane decide`."""

from __future__ import annotations

import time

from policies.facts import DeploymentFacts, Facts, Hint, PairFacts
from router.call import Call
from router.conversations import identity, share
from router.deployments import Deployment
from router.errors import BadRequest
from router.features import CANNOT, needs, output_limit, prompt_tokens, turns_before_question
from router.settings import Settings
from router.tenants import Tenant
from router.wire import read_body, read_text

_USUAL_OUTPUT = 256
"""Tokens expected of an answer where the caller sets no bound."""


def facts_of(
    settings: Settings,
    tenant: Tenant,
    body: bytes,
    *,
    hint: Hint = "auto",
    workers: bool = False,
    labels: str | None = None,
) -> Facts:
    """Facts of a chat completion. `workers`: as if the workers of the file ran and held what they list.

    `labels` is what `x-twolane-labels` would say; a classifier is not asked.

    The draw is fixed, nothing rests, nothing was measured. Raises BadRequest for what no router would take.
    """
    fields = read_body(body)
    model = read_text(fields, "model") or ""
    call = Call(
        id="offline",
        tenant=tenant,
        path="/chat/completions",
        model=model,
        fields=fields,
        stream=False,
        include_usage=False,
        started=0.0,
        hint=hint,
        told_labels=labels,
    )
    group = settings.group(model)
    if group is None:
        raise BadRequest(f"{model!r} is not a model group of the configuration", param="model")
    limit = output_limit(call)
    return Facts(
        model=model,
        deployments=tuple(_deployment(settings, d, workers) for d in settings.groups[group]),
        prompt_tokens=prompt_tokens(call),
        output_tokens=_USUAL_OUTPUT if limit is None else limit,
        needs=needs(call),
        has_context=turns_before_question(call),
        hint=hint,
        draw=0.0,
        now=time.time(),
        strategy=settings.routing.strategy,
        conversation=share(identity(call)),
        labels={**(tenant.labeller.told(call) if tenant.labeller else {}), "tenant": tenant.name},
        use_case=tenant.use_case,
        open_ended=limit is None,
    )


def _deployment(settings: Settings, deployment: Deployment, workers: bool) -> DeploymentFacts:
    available, why = _available(settings, deployment, workers)
    return DeploymentFacts(
        id=deployment.id,
        transport=deployment.transport,
        kind=deployment.kind,
        available=available,
        unavailable=why,
        region=deployment.model_info.region,
        pair=_pair(settings, deployment, workers),
        cannot=CANNOT[deployment.kind],
        weight=deployment.weight,
        order=deployment.order,
    )


def _available(settings: Settings, deployment: Deployment, workers: bool) -> tuple[bool, str]:
    if deployment.local_params is not None:
        held = workers and any(deployment.local_params.model in w.models for w in settings.workers)
        return held, "" if held else "no worker is asked offline"
    if deployment.relay_params is not None:
        for group in (deployment.relay_params.sharer, deployment.relay_params.receiver):
            members = settings.groups[settings.group(group) or group]
            if not any(d.kind in ("http", "litellm", "local") and _available(settings, d, workers)[0] for d in members):
                return False, f"no deployment of {group} is available"
    return True, ""


def _pair(settings: Settings, deployment: Deployment, workers: bool) -> PairFacts | None:
    if deployment.cache_params is None:
        return None
    name = deployment.cache_params.pair
    if not (workers and any(name in w.pairs for w in settings.workers)):
        return PairFacts(name, None, reason="no worker is asked offline")
    written = next(p for p in settings.pairs if p.name == name)
    return PairFacts(name, "assumed", written.mode or "handover", written.scope or "context")
