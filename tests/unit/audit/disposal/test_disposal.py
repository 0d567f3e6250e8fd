"""A log with disposed entries still works and verifies, and nothing else can pass for it."""

import contextlib
import io
import json
import shutil
import sqlite3

import pytest

from appliance.audit import verify
from appliance.audit.disposal.store import DisposalStore
from appliance.audit.export import export_receipt
from appliance.audit.recovery import recover
from appliance.audit.verify import ExitCode
from appliance.errors import AuditVerificationError
from tests.disposed_log import aged, dispose, plan_of, record


@pytest.fixture
def log(sql_store, signer):
    return aged(sql_store, signer)


def verified(export, signer, *options):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = verify.main([*map(str, (export, "--json", "--key", signer.vkey, *options))])
    assert code != ExitCode.UNUSABLE, err.getvalue()
    return json.loads(out.getvalue())


def test_the_export_of_a_log_with_disposed_entries_verifies(log, export, signer):
    before = verified(export(log.store, "before"), signer)
    assert before["verdict"] == "valid"
    disposal = dispose(log)
    assert disposal.below == 1024
    report = verified(export(log.store, "after"), signer)
    assert report["problems"] == []
    assert report["verdict"] == "erased"
    assert report["disposed"]["gone_below"] == 1024
    assert report["disposed"]["kept"] == 2  # the key, and the intent of the request that ended later
    assert report["unknown_keys"] == []
    assert report["open_requests"] == []
    assert len(log.store.leaves(0, 1024)) == 2
    assert len(log.store.leaves(0, log.tree.size)) == log.tree.size - 1024 + 2
