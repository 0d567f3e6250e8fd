"""Commands change the database and the audit log."""

import json
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from click.testing import Result
from sqlalchemy import text
from typer.testing import CliRunner

from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.cli import cli
from appliance.cli.register import parse_expiry
from appliance.errors import (
    ApplianceError,
    ConfigurationError,
    TenantConflictError,
    TenantNotFoundError,
    TenantsAlteredError,
)
from appliance.infra.os_account import account_name
from appliance.tenancy import Limits, Tenant, TenantDirectory, digest_key, make_key
from appliance.tenancy.directory import EndedMakerError
from appliance.tenancy.edits import mint_key
from appliance.tenancy.roster import Roster, find_key, find_tenant
from appliance.tenancy.store import SqlTenantStore
from tests.roster import roster_mac
from tests.unit.tenancy.states import ADMIN, ADMIN_KEY, KEY, STORED

NOW = 1_800_000_000


@dataclass(kw_only=True)
class Site:
    """A data directory with a database, and the commands that use it."""

    data: Path
    store: SqlTenantStore
    log: SqlAuditStore

    def run(self, *words: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(cli, [*words, "--data", str(self.data)], input=stdin)

    def done(self, *words: str, stdin: str | None = None) -> str:
        """Run a command that succeeds; returns its standard output."""
        result = self.run(*words, stdin=stdin)
        assert result.exit_code == 0, result.exception or result.output
        return result.stdout

    def refused(self, *words: str, kind: type[ApplianceError] = ConfigurationError) -> str:
        """Run a command that fails; returns its error.  Nothing was changed."""
        before = self.store.generation(), self.entries()
        result = self.run(*words)
        assert result.exit_code != 0
        assert isinstance(result.exception, kind), result.exception
        assert "\n" not in str(result.exception)
        assert (self.store.generation(), self.entries()) == before
        return str(result.exception)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        return self.store.read().tenants

    def entries(self) -> list[dict[str, Any]]:
        """Without the states that changes lead to."""
        leaves = [decode(leaf.leaf) for leaf in self.log.leaves(0, 1000)]
        return [
            {"type": str(entry.type), **entry.fields}
            for entry in leaves
            if entry.type != EntryType.TENANTS_SEALED
        ]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    url = f"sqlite:///{tmp_path / 'audit.db'}"
    with closing(SqlAuditStore(url)) as log, closing(SqlTenantStore(url, roster_mac(tmp_path))) as store:
        site = Site(data=tmp_path, store=store, log=log)
        operator = Tenant(name="operator", models=(), keys=(ADMIN,))
        store.write(Roster(), (Tenant(name="acme", keys=(STORED,)), operator))
        yield site


def test_tenant_is_created_with_all_options(site: Site):
    site.done(
        "tenant", "create", "new", "--models", "demo,other", "--priority", "interactive",
        "--content", "digest",
        "--speculation", "off", "--may", "lora", "--limit", "requests_per_minute=60",
        "--limit", "org/m:x:tokens_per_day=9",
    )  # fmt: skip
    (new,) = [tenant for tenant in site.tenants if tenant.name == "new"]
    assert (
        new.models,
        str(new.priority),
        str(new.content),
        str(new.speculation),
        list(map(str, new.may)),
    ) == (
        ("demo", "other"),
        "interactive",
        "digest",
        "off",
        ["lora"],
    )
    assert new.limits == Limits(
        requests_per_minute=60, by_model=MappingProxyType({"org/m:x": Limits(tokens_per_day=9)})
    )
    assert site.entries() == [
        {
            "type": "tenant.created",
            "tenant": "new",
            "models": ("demo", "other"),
            "actor": f"cli:{account_name()}",
        }
    ]


def test_set_changes_only_the_given_options(site: Site):
    site.done("tenant", "set", "acme", "--limit", "tokens_per_day=5", "--limit", "tokens_per_month=50")
    site.done("tenant", "set", "acme", "--limit", "tokens_per_day=none", "--models", "")
    assert find_tenant(site.tenants, "acme") == Tenant(
        name="acme", models=(), keys=(STORED,), limits=Limits(tokens_per_month=50)
    )


def test_a_tenant_is_disabled_and_enabled(site: Site):
    site.done("tenant", "disable", "acme")
    assert "acme\tdisabled\tstandard\t*\t1 key" in site.done("tenant", "list").splitlines()
    site.done("tenant", "enable", "acme")
    assert "acme\tenabled\tstandard\t*\t1 key" in site.done("tenant", "list").splitlines()
    assert [entry["changes"] for entry in site.entries()] == [("disabled",), ("disabled",)]


def test_a_changed_database_is_refused_until_it_is_compared_with_the_log_and_sealed(site: Site):
    """Every command says which one to run; that one shows what it would do, and asks."""
    site.done("tenant", "create", "new")
    site.done("key", "create", "new")
    with site.log.database.engine(5).begin() as connection:
        connection.execute(
            text("INSERT INTO api_keys (key_id, tenant, digest, admin) VALUES ('aaaabbbb', 'new', '', 1)")
        )
        connection.execute(text("UPDATE tenants SET content = 'encrypted' WHERE name = 'new'"))
    for words in (("tenant", "list"), ("key", "create", "acme"), ("tenant", "delete", "acme", "--yes")):
        result = site.run(*words)
        assert isinstance(result.exception, TenantsAlteredError)
        assert "`appliance tenant seal`" in str(result.exception)
    assert "confirm this by hand" in site.refused("tenant", "seal", "--yes")
    refused = site.run("tenant", "seal", stdin="n\n")
    assert refused.exit_code != 0
    assert "NOT IN THE LOG  admin key aaaabbbb of new: no entry created it so" in refused.output
    assert "content: encrypted" in refused.output, "which the log cannot correct"
    assert "if something changed the database" in refused.output
    site.done("tenant", "seal", stdin="y\n")
    assert "aaaabbbb" not in site.done("key", "list")
    assert site.entries()[-1] == {
        "type": "tenant.deleted",
        "tenant": "operator",
        "actor": f"cli:{account_name()}",
    }


def test_a_new_mac_key_is_taken_over_without_questions(site: Site):
    site.done("tenant", "create", "new")
    before = site.tenants
    (site.data / "tenants-mac.key").write_text("f" * 64)
    assert "announced exactly these" in site.done("tenant", "seal", "--yes")
    assert site.tenants == before


def test_a_tenant_is_removed_once_it_is_confirmed(site: Site):
    assert site.run("tenant", "delete", "acme", stdin="n\n").exit_code != 0
    assert len(site.tenants) == 2
    site.done("tenant", "delete", "acme", stdin="y\n")
    assert [tenant.name for tenant in site.tenants] == ["operator"]
    assert [entry["type"] for entry in site.entries()] == ["key.revoked", "tenant.deleted"]


def test_a_key_is_shown_once_and_kept_nowhere(site: Site):
    key = site.done("key", "create", "acme", "--models", "demo", "--expires", "90d").strip()
    caller = TenantDirectory(site.tenants).authenticate(key)
    assert (caller.tenant.name, caller.may_use("demo"), caller.may_use("other")) == ("acme", True, False)
    assert caller.key.expires_at is not None
    assert caller.key.created_at is not None
    assert caller.key.expires_at - caller.key.created_at == 90 * 86400
    shown = site.done("tenant", "show", "acme") + site.done("key", "list") + str(site.entries())
    for secret in (key, key[12:], digest_key(key), STORED.digest):
        assert secret not in shown
    assert not [path for path in site.data.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]


def test_programs_read_tenants_and_keys_as_json(site: Site):
    site.done("key", "create", "acme", "--models", "demo")
    listed = json.loads(site.done("key", "list", "acme", "--json"))
    assert {(key["tenant"], key["permissions"], key["state"]) for key in listed} >= {
        ("acme", "demo", "in force")
    }
    shown = json.loads(site.done("tenant", "show", "acme", "--json"))
    assert shown in json.loads(site.done("tenant", "list", "--json"))
    assert {key["key_id"] for key in shown["keys"]} == {key["key_id"] for key in listed}


def test_a_key_for_the_admin_api_opens_nothing_else(site: Site):
    key = site.done("key", "create", "operator", "--admin").strip()
    assert TenantDirectory(site.tenants).authenticate(key).key.admin
    assert site.entries() == [
        {
            "type": "key.created",
            "tenant": "operator",
            "key_id": key.split("-")[1],
            "admin": True,
            "actor": f"cli:{account_name()}",
        }
    ]


def test_an_admin_key_keeps_its_scopes_when_it_is_rotated(site: Site):
    key = site.done("key", "create", "operator", "--admin", "--scope", "workers", "--scope", "read").strip()
    new = site.done("key", "rotate", key.split("-")[1]).strip()
    directory = TenantDirectory(site.tenants)
    assert [directory.authenticate(each).key.scopes for each in (key, new, ADMIN_KEY)] == [
        {"read", "workers"},
        {"read", "workers"},
        None,
    ]
    assert site.entries()[0]["scopes"] == ("read", "workers")
    listed = site.done("key", "list", "operator")
    assert listed.count("\tadmin: read, workers\t") == 2
    assert f"{ADMIN.key_id}\tadmin\t" in listed
    (shown,) = (
        each
        for each in yaml.safe_load(site.done("tenant", "show", "operator"))["keys"]
        if each["key_id"] == new.split("-")[1]
    )
    assert shown["scopes"] == ["read", "workers"]
    assert "only an admin key has scopes" in site.refused("key", "create", "acme", "--scope", "read")


def test_a_key_with_limits_that_may_make_keys_is_created_and_shown(site: Site):
    key = site.done(
        "key", "create", "acme", "--limit", "requests_per_minute=60", "--limit", "demo:tokens_per_day=0",
        "--manage-keys",
    ).strip()  # fmt: skip
    stored = TenantDirectory(site.tenants).authenticate(key).key
    assert stored.manage_keys
    assert stored.limits == Limits(
        requests_per_minute=60, by_model=MappingProxyType({"demo": Limits(tokens_per_day=0)})
    )
    (entry,) = site.entries()
    assert entry["limits"] == ("requests_per_minute=60", "demo:tokens_per_day=0")
    assert entry["manage_keys"] is True
    shown = {each["key_id"]: each for each in yaml.safe_load(site.done("tenant", "show", "acme"))["keys"]}
    assert shown[stored.key_id]["manage_keys"] is True
    assert shown[stored.key_id]["limits"] == {
        "requests_per_minute": 60,
        "by_model": {"demo": {"tokens_per_day": 0}},
    }
    assert not shown[STORED.key_id].keys() & {"manage_keys", "limits", "made_by"}
    rotated = site.done("key", "rotate", stored.key_id).strip()
    successor = TenantDirectory(site.tenants).authenticate(rotated).key
    assert (successor.manage_keys, successor.limits) == (True, stored.limits)


def test_a_key_whose_maker_was_revoked_is_not_shown_as_in_force(site: Site):
    maker_id = site.done("key", "create", "acme", "--manage-keys").strip().split("-")[1]
    roster = site.store.read()
    maker, (text, minted) = find_key(roster.tenants, maker_id)[1], make_key(b"t" * 37)
    site.store.write(roster, mint_key(roster.tenants, "acme", maker, minted, now=NOW))
    assert f"acme\t{minted.key_id}\t*\tin force" in site.done("key", "list", "acme")
    site.done("key", "revoke", maker_id)
    assert f"acme\t{minted.key_id}\t*\tended with its maker" in site.done("key", "list", "acme")
    shown = json.loads(site.done("tenant", "show", "acme", "--json"))["keys"]
    states = {each["key_id"]: (each["state"], each.get("made_by")) for each in shown}
    assert states[minted.key_id] == ("ended with its maker", maker_id)
    with pytest.raises(EndedMakerError):
        TenantDirectory(site.tenants).authenticate(text)


def test_key_for_an_unknown_tenant_creates_no_tenant(site: Site):
    """A mistyped name must not get access to every model."""
    assert "no tenant 'acne'" in site.refused("key", "create", "acne", kind=TenantNotFoundError)


def test_a_key_is_rotated_with_an_overlap(site: Site):
    new = site.done("key", "rotate", STORED.key_id, "--overlap", "2h").strip()
    directory = TenantDirectory(site.tenants)
    assert directory.authenticate(KEY).key.key_id == STORED.key_id
    assert directory.authenticate(new).key.replaces == STORED.key_id
    (_, old) = find_key(site.tenants, STORED.key_id)
    assert old.rotated_at is not None
    assert old.expires_at == old.rotated_at + 2 * 3600
    assert f"acme\t{STORED.key_id}\t*\trotated, until " in site.done("key", "list", "acme")
    assert "rotated already" in site.refused("key", "rotate", STORED.key_id, kind=TenantConflictError)


def test_a_first_starts_key_is_replaced_in_its_file(site: Site):
    """Commands, and the printed curl line, continue to work after their key was rotated."""
    file = site.data / "admin.key"
    file.write_text(ADMIN_KEY + "\n")
    new = site.done("key", "rotate", ADMIN.key_id).strip()
    assert file.read_text() == new + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    demo = site.data / "demo.key"
    demo.write_text(KEY + "\n")
    replaced = site.done("key", "rotate", STORED.key_id).strip()
    assert demo.read_text() == replaced + "\n"
    assert file.read_text() == new + "\n"


def test_a_revoked_key_is_listed_and_opens_nothing(site: Site):
    site.done("key", "revoke", STORED.key_id, "--reason", "lost laptop")
    assert "revoked " in site.done("key", "list", "acme")
    assert site.entries()[-1]["reason"] == "lost laptop"
    site.done("key", "revoke", STORED.key_id)
    assert len(site.entries()) == 1


def test_what_was_exported_is_imported_without_a_change(site: Site, tmp_path: Path):
    file = tmp_path / "tenants.yaml"
    site.done("tenant", "export", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == site.done("tenant", "export")
    before = site.store.read()
    site.done("tenant", "import", str(file), "--prune")
    site.done("tenant", "import", "-", stdin=file.read_text())
    assert (site.store.read(), site.entries()) == (before, [])


def test_import_deletes_only_with_prune(site: Site, tmp_path: Path):
    file = tmp_path / "tenants.yaml"
    content = yaml.safe_load(site.done("tenant", "export"))
    del content["tenants"]["acme"]
    content["tenants"]["new"] = {"models": ["demo"]}
    file.write_text(yaml.safe_dump(content))
    site.done("tenant", "import", str(file))
    assert [tenant.name for tenant in site.tenants] == ["acme", "new", "operator"]
    site.done("tenant", "import", str(file), "--prune")
    assert [tenant.name for tenant in site.tenants] == ["new", "operator"]
    assert [entry["type"] for entry in site.entries()] == ["tenant.created", "key.revoked", "tenant.deleted"]


def test_all_of_a_tenant_is_shown(site: Site):
    shown = yaml.safe_load(site.done("tenant", "show", "acme"))
    assert shown["name"] == "acme"
    assert shown["keys"] == [{"key_id": STORED.key_id, "admin": False, "state": "in force"}]


WIDE = [word for number in range(8) for word in ("--limit", f"{number}{'m' * 254}:tokens_per_day=5")]
SLIPS = [
    (("tenant", "create", "A"), "tenant name 'A'"),
    (("tenant", "create", "x", "--priority", "urgent"), "priority must be"),
    (("tenant", "create", "x", "--may", "everything"), "may must be"),
    (("tenant", "create", "x", "--limit", "60"), "write requests_per_minute=60"),
    (("tenant", "create", "x", "--limit", "requests_per_minute=many"), "write requests_per_minute=60"),
    (("tenant", "create", "x", "--limit", "=5"), "write requests_per_minute=60"),
    (("tenant", "set", "acme", "--limit", "requests_per_second=5"), "requests_per_second is not a limit"),
    (("tenant", "import", "missing.yaml"), "cannot read the tenants file missing.yaml"),
    (("tenant", "export", "/missing/tenants.yaml"), "cannot write /missing/tenants.yaml"),
    (("key", "create", "acme", "--expires", "soon"), "--expires must be a time"),
    (("key", "create", "acme", "--limit", "60"), "write requests_per_minute=60"),
    (("key", "create", "acme", "--limit", "requests_per_second=5"), "requests_per_second is not a limit"),
    (("key", "create", "acme", "--limit", f"{'m' * 256}:tokens_per_day=5", *WIDE), "2048 bytes together"),
    (("key", "create", "operator", "--admin", "--limit", "tokens_per_day=5"), "has no limits"),
    (("key", "create", "operator", "--admin", "--manage-keys"), "an admin key has scopes"),
    (("key", "rotate", STORED.key_id, "--overlap", "long"), "is not a duration"),
    (("key", "revoke", STORED.key_id, "--reason", "x" * 201), "--reason takes one line"),
]


def test_mistyped_argument_is_refused_in_one_line(site: Site):
    for words, expected in SLIPS:
        assert expected in site.refused(*words)


def test_directory_without_a_database_is_not_changed(tmp_path: Path):
    """A wrong --data must not create a new appliance."""
    for words in (["tenant", "list"], ["tenant", "create", "x"], ["key", "list"]):
        result = CliRunner().invoke(cli, [*words, "--data", str(tmp_path)])
        assert isinstance(result.exception, ConfigurationError)
        assert "there is no audit log" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        (None, None),
        ("90d", NOW + 90 * 86400),
        ("12h", NOW + 12 * 3600),
        ("2027-01-15", 1_799_971_200),
        ("2027-01-15T01:00:00+01:00", 1_799_971_200),
    ],
)
def test_expiry_is_a_duration_or_a_time(text: str | None, moment: int | None):
    assert parse_expiry(text, NOW + 0.9) == moment
