"""A worker's page: what its speculation does at each batch size, and the actions of the admin API."""

import math
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from appliance.api import speculation as speculation_api
from appliance.api import workers as workers_api
from appliance.api.console import views
from appliance.api.console.console import Console, show_moment
from appliance.api.console.operators import Operator, fragment, page
from appliance.api.console.sessions import Notice
from appliance.api.services import Services
from appliance.control.override import AUTO, EVERY_WORKER, MAXIMUM_SECONDS, MODES, Override, override_for
from appliance.control.view import BucketView
from appliance.speculation.values import SpeculationMode


def path_of(request: Request) -> str:
    return f"/workers/{quote(request.path_params['worker'], safe='')}"


async def show(request: Request, services: Services, console: Console, operator: Operator) -> Response:
    view = await _view(request, services, console)
    return page(console, "worker", operator=operator, **view)


async def show_live(request: Request, services: Services, console: Console, _operator: Operator) -> Response:
    return fragment(console, "worker", **await _view(request, services, console))


async def drain(request: Request, services: Services, operator: Operator, form: dict[str, str]) -> Notice:
    members = {"note": form.get("note", ""), "force": "force" in form}
    worker = request.path_params["worker"]
    await workers_api.set_drained(services, operator.caller, worker, members, drained=True)
    return Notice(text="The worker gets no new requests; those in flight finish.")


async def undrain(request: Request, services: Services, operator: Operator, form: dict[str, str]) -> Notice:
    members = {"note": form.get("note", "")}
    worker = request.path_params["worker"]
    await workers_api.set_drained(services, operator.caller, worker, members, drained=False)
    return Notice(text="The worker gets requests again.")


async def recycle(request: Request, services: Services, operator: Operator, form: dict[str, str]) -> Notice:
    members = {"note": form.get("note", ""), "with_draft": form.get("draft") != "without"}
    speculation_api.start_recycle(services, operator.caller, request.path_params["worker"], members)
    return Notice(text="The worker is drained and then restarted; the overview shows when it is back.")


async def override(request: Request, services: Services, operator: Operator, form: dict[str, str]) -> Notice:
    members: dict[str, Any] = {
        "worker": request.path_params["worker"],
        "mode": form.get("mode"),
        "note": form.get("note", ""),
    }
    if form.get("draft_tokens"):
        members["draft_tokens"] = _number(form["draft_tokens"])
    if form.get("minutes"):
        members["seconds"] = 60 * _number(form["minutes"])
    order = await speculation_api.set_override(services, operator.caller, members)
    if order is None:
        return Notice(text="The override is removed: the monitor decides again.")
    return Notice(text=f"The worker is {_words(order)}; the next control step applies it.")


def _number(text: str) -> int:
    """Of a field of a form; what is no number is out of every range."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(MAXIMUM_SECONDS)) else -1


async def _view(request: Request, services: Services, console: Console) -> dict[str, Any]:
    snapshot = workers_api.known(services, request.path_params["worker"])
    worker_id, now = snapshot.worker.worker_id, services.clock()
    overrides, failure = await speculation_api.read_overrides(services, now)
    order, view = override_for(overrides, worker_id, now), services.control.view(worker_id)
    shown = views.worker_figures(services, console, snapshot)
    return {
        "worker": shown,
        "url": snapshot.worker.url,
        "engine": snapshot.engine,
        "draft": snapshot.draft,
        "speculates": snapshot.speculates,
        "problems": view.problems if view else (),
        "since": view.since if view else 0.0,
        "exploration": view.exploration_share if view else None,
        "buckets": [_bucket(bucket) for bucket in view.buckets] if view else [],
        "override": _words(order) if order else "",
        "overrides_failure": failure,
        "removes": order.worker == worker_id if order else False,
        "auto": AUTO,
        "modes": {str(mode): views.MODES[mode] for mode in MODES},
        "status": f"{worker_id}: {shown['mode'] if snapshot.healthy else 'down'}. {shown['reason']}",
    }


def _bucket(view: BucketView) -> dict[str, Any]:
    best = max(view.tokens_per_second.values(), default=0.0)
    return {
        "size": view.bucket,
        "draft_tokens": view.draft_tokens,
        "reason": views.REASONS[view.reason],
        "gain": math.expm1(view.payoff) * 100 if view.payoff is not None else None,
        "break_even": view.break_even,
        "speeds": [
            {"draft_tokens": k, "speed": speed, "share": speed / best, "is_chosen": k == view.draft_tokens}
            for k, speed in view.tokens_per_second.items()
        ],
    }


def _words(order: Override) -> str:
    mode = views.MODES[order.mode]
    if order.mode is SpeculationMode.SPECULATIVE and order.draft_tokens is not None:
        mode += f" with {order.draft_tokens} draft tokens"
    whose = ", as every worker," if order.worker == EVERY_WORKER else ""
    note = f": {order.note}" if order.note else ""
    return f"{mode}{whose} until {show_moment(order.expires_at)}, set by {order.actor}{note}"
