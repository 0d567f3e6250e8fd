"""
Drafts for operators: what is in service, and orders to take one into service or out of it.

An order is answered once it is begun; how it goes on is asked with `GET`.
"""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import admin_caller
from appliance.api.body import read_members
from appliance.api.services import Services
from appliance.control.override import parse_note
from appliance.drafts.promotion.promoter import Promoter
from appliance.drafts.promotion.promotion import Promotion
from appliance.errors import ControlRefusedError, InvalidRequestError
from appliance.tenancy import Caller

router = APIRouter()
AdminCaller = Annotated[Caller, Depends(admin_caller)]


@router.get("/drafts")
async def show(request: Request, _caller: AdminCaller) -> Response:
    """What serves each target, which draft each worker has, and the newest promotions."""
    promoter = _promoter(request)
    return JSONResponse(
        {
            "acting": promoter.is_acting,
            "standings": [asdict(standing) for standing in await promoter.standings()],
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
    """Begin to take a draft into service: on one worker first, then on the others, or back again."""
    members = await read_members(request, "draft", "without_evaluation", "allow_downtime")
    reason = members.get("without_evaluation")
    promotion = await _promoter(request).promote(
        _text(members, "draft"),
        actor=caller.key.key_id,
        without_evaluation=None if reason is None else _reason(reason, "without_evaluation"),
        allow_downtime=_flag(members, "allow_downtime"),
    )
    return JSONResponse(_promotion(promotion), status_code=202)


@router.post("/drafts/rollbacks")
async def roll_back(request: Request, caller: AdminCaller) -> Response:
    """Begin to take a draft out of service again, or to give a promotion back that is under way."""
    members = await read_members(request, "to", "reason", "model", "allow_downtime")
    promotion = await _promoter(request).roll_back(
        to=_text(members, "to") if members.get("to") is not None else None,
        reason=_reason(members.get("reason"), "reason"),
        actor=caller.key.key_id,
        model=_text(members, "model") if members.get("model") is not None else None,
        allow_downtime=_flag(members, "allow_downtime"),
    )
    return JSONResponse(_promotion(promotion), status_code=202)


def _promoter(request: Request) -> Promoter:
    services: Services = request.app.state.services
    if services.promoter is None:
        message = "This gateway keeps no drafts."
        raise ControlRefusedError(message)
    return services.promoter


def _promotion(promotion: Promotion) -> dict[str, Any]:
    return asdict(promotion) | {"over": promotion.is_over}


def _text(members: dict[str, Any], name: str) -> str:
    text = members.get(name)
    if not isinstance(text, str) or not text.strip() or not text.isprintable():
        message = f"`{name}` must be one line of text."
        raise InvalidRequestError(message, param=name)
    return text


def _reason(given: object, name: str) -> str:
    """Why, in the operator's words; an order that takes a safeguard away needs some."""
    reason = parse_note(given)
    if not reason.strip():
        message = f"`{name}` must say why."
        raise InvalidRequestError(message, param=name)
    return reason


def _flag(members: dict[str, Any], name: str) -> bool:
    flag = members.get(name, False)
    if not isinstance(flag, bool):
        message = f"`{name}` must be true or false."
        raise InvalidRequestError(message, param=name)
    return flag
