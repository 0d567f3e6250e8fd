"""The site's signing key is made once; trusted keys come from the settings."""

import stat
from pathlib import Path

import pytest

from appliance.drafts.registry.draft_source import read_source
from appliance.drafts.registry.site_registry import open_registry, site_signer
from appliance.errors import AuditKeyError, ConfigurationError, DraftRefusedError
from appliance.infra.settings import AuditSettings, DataSettings, DraftSettings, Settings
from tests.unit.drafts.registry.site import MAKER_KEY, NOW, Site, new_key
from tests.unit.drafts.registry.test_draft_registry_faults import start, wait_for


def settings(data: Path, **drafts: Path) -> Settings:
    return Settings(
        data=DataSettings(directory=data),
        audit=AuditSettings(origin="site.example/audit"),
        drafts=DraftSettings(**drafts),
    )


def inside(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_reading_the_registry_makes_no_key(tmp_path):
    registry = open_registry(settings(tmp_path / "data"), lambda: NOW)
    assert (registry.trusted, registry.revisions()) == ((), ())
    assert not (tmp_path / "data").exists()


def test_key_is_made_when_it_is_first_needed_and_then_kept(tmp_path):
    chosen = settings(tmp_path / "data")
    key = site_signer(chosen).verifier_key
    assert key.name == "site.example/audit/drafts"
    assert site_signer(chosen).verifier_key == key
    assert [each.verifier_key for each in open_registry(chosen, lambda: NOW).trusted] == [key]
    assert stat.S_IMODE((tmp_path / "data" / "drafts.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert inside(tmp_path / "data") == ["drafts.key"]


def test_concurrent_processes_get_the_same_key(tmp_path):
    """What one of them signs, the others can read."""
    for number in range(5):
        chosen = settings(tmp_path / f"data-{number}")
        names = [tmp_path / f"seen-{number}-{each}" for each in range(3)]
        children = [
            start(lambda name=name, chosen=chosen: name.write_text(site_signer(chosen).verifier_key.encode()))
            for name in names
        ]
        assert wait_for(children) == [0, 0, 0]
        assert {name.read_text() for name in names} == {site_signer(chosen).verifier_key.encode()}
        assert inside(tmp_path / f"data-{number}") == ["drafts.key"]


def test_key_at_a_configured_path_is_never_made(tmp_path):
    """A forgotten mount must not create a second key."""
    chosen = settings(tmp_path / "data", signing_key_file=tmp_path / "vault" / "drafts.key")
    with pytest.raises(AuditKeyError, match="no signing key"):
        site_signer(chosen)
    assert not (tmp_path / "vault").exists()


def test_key_that_others_can_read_is_refused(tmp_path):
    chosen = settings(tmp_path / "data")
    site_signer(chosen)
    (tmp_path / "data" / "drafts.key").chmod(0o644)
    with pytest.raises(AuditKeyError, match="chmod 600"):
        open_registry(chosen, lambda: NOW)


def test_data_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(ConfigurationError, match="cannot make"):
        site_signer(settings(tmp_path / "data"))


def test_keys_of_the_file_and_the_site_are_trusted(tmp_path):
    maker, stranger = new_key(tmp_path / "maker.key", MAKER_KEY), new_key(tmp_path / "other.key", "x.example")
    keys = tmp_path / "keys.txt"
    keys.write_text(f"# drafts\n{maker.verifier_key.encode()} not-after=2030-12-31\n")
    chosen = settings(tmp_path / "data", trusted_keys_file=keys)
    own = site_signer(chosen).verifier_key
    registry = open_registry(chosen, lambda: NOW)
    assert [each.verifier_key for each in registry.trusted] == [own, maker.verifier_key]
    site = Site.open(tmp_path / "site")
    source = site.draft()
    revision = registry.register(read_source(source), target=site.target, how="imported", signer=stranger)
    with pytest.raises(DraftRefusedError, match="no trusted key"):
        open_registry(chosen, lambda: NOW).find(revision.hex)


def test_file_of_keys_that_is_not_there_stops_everything(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read the trusted keys"):
        open_registry(settings(tmp_path / "data", trusted_keys_file=tmp_path / "none"), lambda: NOW)
