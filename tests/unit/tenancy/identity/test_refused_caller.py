"""Every reason is known to operators, none to clients."""

import re
from pathlib import Path

import pytest

from appliance.api.errors import render
from appliance.tenancy.identity.refusal import RefusalReason, RefusedCallerError

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "single-sign-on.md"


def test_the_page_for_operators_tells_what_to_do_about_each_reason():
    """No more and no fewer than there are."""
    table = PAGE.read_text(encoding="utf-8").partition("| Reason |")[2]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    told = {word for row in rows for word in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert told == set(RefusalReason)


@pytest.mark.parametrize("reason", RefusalReason)
def test_no_client_can_tell_one_refusal_from_another(reason):
    """Status, headers and body are the same, byte for byte."""
    answer, other = (render(RefusedCallerError(given)) for given in (reason, RefusalReason.API_KEY))
    assert answer.status_code == 401
    assert answer.body == other.body
    assert answer.raw_headers == other.raw_headers
