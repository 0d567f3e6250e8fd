"""The keys of a first start, and the import of the tenants file at every start."""

import stat
from contextlib import closing
from pathlib import Path

import pytest

from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.control.tenants.enrolment import enrol
from appliance.control.tenants.registrar import Registrar
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import locate, prepare
from appliance.infra.files import write_private
from appliance.infra.settings import DataSettings, Settings
from appliance.tenancy import Tenant, TenantDirectory, encode_tenants
from appliance.tenancy.edits import delete_tenant, revoke_key
from appliance.tenancy.store import SqlTenantStore
from tests.roster import roster_mac
from tests.unit.tenancy.states import ADMIN, ADMIN_KEY, KEY, STORED


class Site:
    """A data directory with its database, and the start of a gateway in it."""

    def __init__(self, directory: Path, store: SqlTenantStore) -> None:
        self.installation = locate(Settings(data=DataSettings(directory=directory)))
        self.store = store
        self.recorded = []
        self.registrar = Registrar(store=store, record=self._record)

    async def _record(self, entry_type, **fields):
        if entry_type != EntryType.TENANTS_SEALED:
            self.recorded.append((str(entry_type), fields["actor"]))

    async def start(self, file=None, *, demo=True):
        """Start; returns the directory in force, and the keys shown, by purpose."""
        roster, first = await enrol(
            self.registrar, self.installation, file=file, demo=demo, actor="cli:me", clock=lambda: 1000.0
        )
        assert roster == self.store.read()
        return TenantDirectory(roster.tenants), {each.purpose: each.text for each in first}


@pytest.fixture
def open_site(tmp_path):
    """Data directories that share a database."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    SqlAuditStore(url).close()
    with closing(SqlTenantStore(url, roster_mac(tmp_path))) as store:

        def open_(name="data"):
            site = Site(tmp_path / name, store)
            prepare(site.installation, create_signing_key=lambda path: path.write_text("made just now"))
            return site

        yield open_


@pytest.fixture
def site(open_site):
    return open_site()


def files(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


async def test_a_first_start_shows_its_keys_and_they_work(site):
    """The admin key opens the admin API, the demo key opens the models; both are in the log."""
    directory, shown = await site.start()
    assert set(shown) == {"admin", "demo tenant"}
    assert directory.authenticate(shown["admin"]).key.admin
    demo = directory.authenticate(shown["demo tenant"])
    assert (demo.tenant.name, demo.key.admin, demo.may_use("any")) == ("demo", False, True)
    assert site.recorded == [
        ("tenant.created", "cli:me"),
        ("key.created", "cli:me"),
        ("tenant.created", "cli:me"),
        ("key.created", "cli:me"),
    ]


async def test_each_first_key_is_in_a_file_of_its_own(site, tmp_path):
    """Readable by its owner; no other file has the key."""
    _, shown = await site.start()
    for purpose, path in (
        ("admin", site.installation.admin_key),
        ("demo tenant", site.installation.demo_key),
    ):
        assert path.read_text() == shown[purpose] + "\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [at for at, content in files(tmp_path).items() if shown[purpose].encode() in content] == [path]


async def test_a_gateway_makes_no_demo_tenant(site):
    directory, shown = await site.start(demo=False)
    assert [tenant.name for tenant in directory.tenants] == ["operator"]
    assert set(shown) == {"admin"}
    assert not site.installation.demo_key.exists()


async def test_the_admin_tenant_may_use_no_model(site):
    """A leaked admin key cannot be used for completions."""
    directory, shown = await site.start()
    assert not directory.authenticate(shown["admin"]).may_use("demo")


async def test_a_second_start_shows_nothing_and_changes_nothing(site):
    """Keys are shown once, and stay valid."""
    _, shown = await site.start()
    before = files(site.installation.directory)
    site.recorded.clear()
    directory, again = await site.start()
    assert again == {}
    assert directory.authenticate(shown["demo tenant"])
    assert (files(site.installation.directory), site.recorded) == (before, [])


async def test_a_second_gateway_on_the_same_database_makes_no_keys(open_site):
    """It serves the existing tenants; its own directory holds no key."""
    _, shown = await open_site("first").start()
    second = open_site("second")
    directory, more = await second.start()
    assert more == {}
    assert directory.authenticate(shown["admin"])
    assert not second.installation.admin_key.exists()


async def test_of_two_first_starts_at_once_one_makes_the_keys(open_site):
    """The other one keeps no file with a key that does not work."""
    first, second = open_site("first"), open_site("second")
    shown = []

    async def meanwhile(entry_type, **fields):
        if not shown:
            shown.append(None)
            shown[0] = (await second.start())[1]
        await Site._record(first, entry_type, **fields)

    first.registrar = Registrar(store=first.store, record=meanwhile)
    directory, own = await first.start()
    assert own == {}
    assert directory.authenticate(shown[0]["admin"])
    assert not first.installation.admin_key.exists()
    assert not first.installation.demo_key.exists()
    assert second.installation.admin_key.exists()


async def test_a_removed_tenant_is_not_created_again(site):
    """Neither the demo tenant nor an admin: a later start is not a first one."""
    _, shown = await site.start()
    admin_id = shown["admin"].split("-")[1]
    await site.registrar.apply(lambda tenants: delete_tenant(tenants, "demo"), actor="me")
    await site.registrar.apply(lambda tenants: revoke_key(tenants, admin_id, now=5), actor="me")
    directory, again = await site.start()
    assert again == {}
    assert [tenant.name for tenant in directory.tenants] == ["operator"]


async def test_a_start_that_crashed_is_completed_by_the_next(site):
    """The admin key's file exists but its key does not work: the next start replaces it."""
    write_private(site.installation.admin_key, "an unknown admin key\n")
    directory, shown = await site.start()
    assert site.installation.admin_key.read_text().strip() == shown["admin"]
    assert directory.authenticate(shown["admin"])


async def test_a_tenants_file_replaces_the_demo_tenant(site):
    """An admin key is made, because the file has none."""
    write_private(site.installation.tenants, encode_tenants([Tenant(name="acme", keys=(STORED,))]))
    directory, shown = await site.start()
    assert [tenant.name for tenant in directory.tenants] == ["acme", "operator"]
    assert set(shown) == {"admin"}
    assert directory.authenticate(KEY).tenant.name == "acme"


async def test_with_an_admin_key_in_the_file_no_key_is_made(site, tmp_path):
    """And the operator's own file is unchanged."""
    write_private(site.installation.admin_key, ADMIN_KEY + "\n")
    elsewhere = tmp_path / "git" / "tenants.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(encode_tenants([Tenant(name="root", models=(), keys=(ADMIN,))]))
    directory, shown = await site.start(elsewhere)
    assert shown == {}
    assert directory.authenticate(ADMIN_KEY).key.admin
    assert site.installation.admin_key.read_text() == ADMIN_KEY + "\n"


async def test_a_file_is_imported_at_every_start_and_removes_nothing(site, tmp_path):
    """Tenants made by command stay; the file's members of a tenant win."""
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {acme: {models: [a]}}")
    await site.start(file)
    file.write_text("tenants: {acme: {models: [b]}, new: {}}")
    directory, _ = await site.start(file)
    assert [tenant.name for tenant in directory.tenants] == ["acme", "new", "operator"]
    assert directory.tenant("acme").models == ("b",)


@pytest.mark.parametrize("content", [None, "tenants: {", b"\xff"])
async def test_a_file_that_cannot_be_used_stops_the_start(site, tmp_path, content):
    """It is not treated as empty, and nothing is made."""
    file = tmp_path / "tenants.yaml"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError) as caught:
        await site.start(file)
    assert "\n" not in str(caught.value)
    assert site.store.generation() == 0
