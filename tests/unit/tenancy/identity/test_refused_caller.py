"""Every reason is known to operators, none to clients."""

import re
from pathlib import Path

import pytest

from appliance.api.error_responses import render
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "single-sign-on.md"


def test_how_to_lists_every_refusal_reason():
    table = PAGE.read_text(encoding="utf-8").partition("| Reason |")[2]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    told = {word for row in rows for word in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert told == set(RefusalReason)


@pytest.mark.parametrize("reason", RefusalReason)
def test_all_refusals_look_alike_to_clients(reason):
    answer, other = (render(RefusedCallerError(given)) for given in (reason, RefusalReason.API_KEY))
    assert answer.status_code == 401
    assert answer.body == other.body
    assert answer.raw_headers == other.raw_headers
