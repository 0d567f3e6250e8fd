"""
Admin routes for drafts: which are deployed, promotion and rollback.

A promotion or rollback is answered once it has started; `GET` shows its progress.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import AdminCaller
from appliance.api.body import read_flag, read_members
from appliance.api.services import Services
from appliance.control.override import parse_note
from appliance.drafts.promotion.promoter import Promoter
from appliance.drafts.promotion.promotion import Promotion
from appliance.errors import ControlRefusedError, InvalidRequestError
from appliance.tenancy import Caller

router = APIRouter()


@router.get("/drafts")
async def show(request: Request, _caller: AdminCaller) -> Response:
    """The active draft of each target, the draft of each worker, and the newest promotions."""
    promoter = _promoter(request.app.state.services)
    return JSONResponse(
        {
            "acting": promoter.is_acting,
            "standings": [asdict(active) for active in await promoter.active_drafts()],
            "workers": [
                {
                    "worker": seen.worker.worker_id,
                    "target": seen.weights,
                    "draft": seen.draft,
                    "models": [served.name for served in seen.models],
                    "takes_requests": seen.takes_requests,
                }
                for seen in promoter.workers
            ],
            "promotions": [_promotion(each) for each in await promoter.promotions()],
        }
    )


@router.post("/drafts/promotions")
async def promote(request: Request, caller: AdminCaller) -> Response:
    """Start a promotion: canary on one worker, then roll out or roll back."""
    members = await read_members(request, "draft", "without_evaluation", "allow_downtime")
    promotion = await start_promotion(request.app.state.services, caller, members)
    return JSONResponse(_promotion(promotion), status_code=202)


async def start_promotion(services: Services, caller: Caller, members: Mapping[str, Any]) -> Promotion:
    reason = members.get("without_evaluation")
    return await _promoter(services).promote(
        _text(members, "draft"),
        actor=caller.key.key_id,
        without_evaluation=None if reason is None else _reason(reason, "without_evaluation"),
        allow_downtime=read_flag(members, "allow_downtime"),
    )


@router.post("/drafts/rollbacks")
async def roll_back(request: Request, caller: AdminCaller) -> Response:
    """Start the rollback of a draft, or of the running promotion."""
    members = await read_members(request, "to", "reason", "model", "allow_downtime")
    promotion = await start_rollback(request.app.state.services, caller, members)
    return JSONResponse(_promotion(promotion), status_code=202)


async def start_rollback(services: Services, caller: Caller, members: Mapping[str, Any]) -> Promotion:
    """Start a rollback, or cancel the running promotion, which is returned then."""
    return await _promoter(services).roll_back(
        to=_text(members, "to") if members.get("to") is not None else None,
        reason=_reason(members.get("reason"), "reason"),
        actor=caller.key.key_id,
        model=_text(members, "model") if members.get("model") is not None else None,
        allow_downtime=read_flag(members, "allow_downtime"),
    )


def _promoter(services: Services) -> Promoter:
    if services.promoter is None:
        raise ControlRefusedError("This gateway has no draft registry.")
    return services.promoter


def _promotion(promotion: Promotion) -> dict[str, Any]:
    return asdict(promotion) | {"over": promotion.is_over}


def _text(members: Mapping[str, Any], name: str) -> str:
    text = members.get(name)
    if not isinstance(text, str) or not text.strip() or not text.isprintable():
        raise InvalidRequestError(f"`{name}` must be one line of text.", param=name)
    return text


def _reason(given: object, name: str) -> str:
    """The operator's reason; disabling a safeguard needs one."""
    reason = parse_note(given)
    if not reason.strip():
        raise InvalidRequestError(f"`{name}` must give a reason.", param=name)
    return reason
