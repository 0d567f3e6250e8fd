"""Which paths a worker may open: all but the hidden ones, except some of these."""

import errno
from pathlib import Path

import pytest

from appliance.errors import ConfigurationError
from appliance.infra.data_directory import locate, private_paths
from appliance.infra.settings import load_settings
from appliance.sovereignty import landlock
from appliance.sovereignty.file_wall import plan_file_wall, visible_paths


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("site/data/drafts/revisions", "site/data/files", "site/models", "home"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "site" / "notes").touch()
    (tmp_path / "site" / "data" / "audit.key").touch()
    return tmp_path


def test_everything_beside_a_hidden_path_stays_open_and_nothing_above_it(tree):
    data = tree / "site" / "data"
    visible = visible_paths(frozenset({data}), [data / "drafts" / "revisions"])
    assert {tree / "home", tree / "site" / "models", tree / "site" / "notes"} <= visible
    assert data / "drafts" / "revisions" in visible
    opened = {path for path in visible if path == data or path in data.parents or data in path.parents}
    assert opened == {data / "drafts" / "revisions"}


def test_a_shown_path_does_not_open_a_hidden_one_below_it(tree):
    """As if the models' directory were the interpreter's, with the data in it."""
    data = tree / "site" / "data"
    visible = visible_paths(frozenset({data, data / "audit.key"}), [tree / "site", data])
    assert not visible & {tree / "site", data, data / "audit.key"}


def test_a_symbolic_link_opens_nothing(tree):
    (tree / "home" / "link").symlink_to(tree / "site" / "data")
    (tree / "link").symlink_to(tree / "site" / "data")
    visible = visible_paths(frozenset({tree / "site" / "data"}), [])
    assert tree / "link" not in visible
    assert tree / "site" / "data" not in {path.resolve() for path in visible}


def test_secrets_are_hidden_wherever_the_settings_place_them(tmp_path):
    elsewhere = {
        "audit": {
            "signing_key_file": "signing.key",
            "spool_directory": "spool",
            "payload_keys_directory": "keys",
            "payload_master_key_file": "master.key",
        },
        "batch": {"directory": "files"},
        "tls": {"certificate_file": "c.pem", "key_file": "k.pem", "key_password_file": "pw"},
        "pool": {"certificate_file": "g.pem", "key_file": "g.key"},
        "drafts": {"signing_key_file": "drafts.key"},
        "tenants": {"file": "tenants.yaml", "mac_key_file": "mac.key"},
        "data": {"directory": "data"},
    }
    paths = {
        section: {name: str(tmp_path / section / value) for name, value in values.items()}
        for section, values in elsewhere.items()
    }
    settings = load_settings(environment={}, overrides=paths)
    hidden = private_paths(settings, locate(settings))
    public = {"certificate_file"}
    assert hidden == {
        *(Path(path) for values in paths.values() for name, path in values.items() if name not in public),
        tmp_path / "audit" / "signing-mldsa.key",
        tmp_path / "drafts" / "drafts-mldsa.key",
    }


def test_the_key_for_the_siem_is_hidden(tmp_path):
    forward = {
        "destination": "siem:6514",
        "certificate_file": "c.pem",
        "key_file": str(tmp_path / "siem.key"),
    }
    settings = load_settings(environment={}, overrides={"audit": {"forward": forward}})
    assert tmp_path / "siem.key" in private_paths(settings, locate(settings))


def test_a_worker_gets_a_temporary_directory_only_if_that_of_the_system_lies_above_the_data(
    tree, monkeypatch
):
    data, home = tree / "site" / "data", tree / "home"
    monkeypatch.setattr("tempfile.tempdir", str(tree / "home"))
    wall, _ = plan_file_wall("on", [data], [], home=home)
    assert (wall.temporary, wall.caches) == (None, ())
    monkeypatch.setattr("tempfile.tempdir", str(tree))
    wall, _ = plan_file_wall("on", [data], [], home=tree / "site")
    assert wall.temporary in wall.shown
    assert wall.temporary.parent == tree
    with wall.prepared():
        assert wall.temporary.is_dir()
        assert {path.name for path in (tree / "site").iterdir()} > {".cache", ".config"}
    assert not wall.temporary.exists()


def test_a_kernel_without_landlock_is_reported_or_refused(tree, monkeypatch):
    def no_landlock() -> int:
        raise OSError(errno.ENOSYS, "said the kernel")

    monkeypatch.setattr(landlock, "abi_version", no_landlock)
    assert plan_file_wall("on", [tree], [], home=tree) == (None, "not up: the kernel has no Landlock")
    assert plan_file_wall("off", [tree], [], home=tree) == (None, "off, by sovereignty.wall")
    with pytest.raises(ConfigurationError, match="required, but the kernel has no Landlock"):
        plan_file_wall("required", [tree], [], home=tree)
