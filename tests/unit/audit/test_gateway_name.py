"""A gateway keeps its name, and no other process has it."""

import pytest

from appliance.audit.gateway_name import GatewayName
from appliance.errors import ConfigurationError


def test_a_name_is_made_once_and_kept(tmp_path):
    """The next start finds what the first one wrote."""
    first = GatewayName.hold(tmp_path / "gateway.id")
    first.release()
    again = GatewayName.hold(tmp_path / "gateway.id")
    again.release()
    other = GatewayName.hold(tmp_path / "another.id")
    other.release()
    assert first.name == again.name == (tmp_path / "gateway.id").read_text().strip()
    assert first.name != other.name


def test_name_is_held_exclusively(tmp_path):
    """A second process on the same data directory is refused, also under another name."""
    held = GatewayName.hold(tmp_path / "gateway.id")
    for configured in (None, "another"):
        with pytest.raises(ConfigurationError, match="another gateway runs"):
            GatewayName.hold(tmp_path / "gateway.id", configured)
    held.release()
    GatewayName.hold(tmp_path / "gateway.id").release()


def test_a_configured_name_is_used_and_not_kept(tmp_path):
    """The settings decide at each start."""
    GatewayName.hold(tmp_path / "gateway.id").release()
    kept = (tmp_path / "gateway.id").read_text()
    held = GatewayName.hold(tmp_path / "gateway.id", "gateway-0")
    held.release()
    assert held.name == "gateway-0"
    assert (tmp_path / "gateway.id").read_text() == kept


@pytest.mark.parametrize("name", ["two words", "-dash", "x" * 64, "line\nbreak"])
def test_malformed_gateway_names_are_refused(tmp_path, name):
    """It goes into every intent, and into what operators read."""
    with pytest.raises(ConfigurationError, match="cannot name a gateway"):
        GatewayName.hold(tmp_path / "gateway.id", name)


def test_unwritable_directory_is_reported(tmp_path):
    """One line, at start."""
    with pytest.raises(ConfigurationError, match="cannot use"):
        GatewayName.hold(tmp_path / "missing" / "gateway.id")
