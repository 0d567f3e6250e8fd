"""What the endpoint picker refuses at its start."""

import sys

import pytest
from typer.testing import CliRunner

from appliance.app.picker_process import refuse_names
from appliance.cli import cli
from appliance.errors import ConfigurationError


@pytest.mark.parametrize("url", ["http://worker-1:8000", "http://localhost:8000", "http://"])
def test_workers_by_name_are_refused_since_proxies_know_addresses(url):
    with pytest.raises(ConfigurationError, match=r"pool\.discover"):
        refuse_names(("http://10.0.0.5:8000", url))


def test_workers_by_address_are_accepted():
    refuse_names(("http://10.0.0.5:8000", "http://[fd00::5]:8000"))


def test_a_picker_without_workers_does_not_start(tmp_path):
    result = CliRunner().invoke(cli, ["picker", "--data", str(tmp_path)])
    assert "pool.discover or pool.urls" in str(result.exception)


def test_without_its_packages_it_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "appliance.app.picker_process")
    monkeypatch.setitem(sys.modules, "grpc", None)
    result = CliRunner().invoke(cli, ["picker", "--data", str(tmp_path)])
    assert isinstance(result.exception, ConfigurationError)
    assert "sovereign-appliance[picker]" in str(result.exception)
