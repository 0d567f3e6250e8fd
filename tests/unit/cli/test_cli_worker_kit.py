"""What an init container leaves for the vLLM of others."""

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from appliance.cli import cli
from appliance.errors import ConfigurationError

FIND = """
import sys
from importlib.metadata import entry_points
before = set(sys.modules)
(plugin,) = entry_points(group="vllm.general_plugins", name="appliance")
print(sys.modules[plugin.load().__module__].__file__)
from appliance.serving.vllm.middleware import GatewayMiddleware
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
OF_VLLM = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "yaml"}
"""Packages that every vLLM has."""


def kit(directory: Path):
    return CliRunner().invoke(cli, ["worker-kit", str(directory)])


def test_a_python_with_the_kit_on_its_path_finds_the_plugin(tmp_path):
    assert kit(tmp_path).exit_code == 0
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{FIND}"
    found = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    file, packages = found.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert {name for name in packages.split() if "ython" not in name and "_sys" not in name} <= OF_VLLM | {
        "appliance",
        "__mp_main__",
    }


def test_kit_can_be_read_by_every_user_and_says_what_to_set(tmp_path):
    told = kit(tmp_path / "kit").stdout
    assert f"PYTHONPATH={tmp_path / 'kit'}" in told
    assert "APPLIANCE_OPEN_ROUTES=1" in told
    assert "APPLIANCE_CONTROL_ADDRESS=0.0.0.0:PORT" in told
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in (tmp_path / "kit").rglob("*"))


def test_a_second_start_of_the_pod_replaces_the_kit(tmp_path):
    kit(tmp_path)
    (tmp_path / "appliance" / "of_an_earlier_version.py").touch()
    assert kit(tmp_path).exit_code == 0
    assert not (tmp_path / "appliance" / "of_an_earlier_version.py").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    result = kit(tmp_path / "file")
    assert isinstance(result.exception, ConfigurationError)
    assert str(tmp_path / "file") in str(result.exception)
