"""`appliance worker-kit`: add the plugin to the vLLM of others, from an init container."""

import shutil
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated

import typer

import appliance
from appliance.errors import ConfigurationError
from appliance.serving.launch import MIDDLEWARE
from appliance.serving.worker_protocol import CONTROL_ADDRESS, OPEN_ROUTES, TOKEN_FILE

DISTRIBUTION = "sovereign-appliance"
PLUGINS = "vllm.general_plugins"
ALL_MAY_READ = {True: 0o755, False: 0o644}
"""Mode of directories and files: vLLM may run as another user than the init container."""

commands = typer.Typer()


@commands.command(name="worker-kit")
def worker_kit(
    directory: Annotated[Path, typer.Argument(help="Directory that the vLLM container mounts as well.")],
) -> None:
    """Copy the plugin for a vLLM that others start and route to; print what its container needs."""
    try:
        _copy(directory)
    except OSError as error:
        message = f"cannot write the worker kit to {directory}: {error.strerror}; mount a volume there"
        raise ConfigurationError(message) from error
    typer.echo(
        f"the worker kit is in {directory}; the vLLM container needs\n"
        f"  PYTHONPATH={directory.absolute()}\n"
        f"  {TOKEN_FILE}=FILE  (the control token of the gateways that control it)\n"
        f"  {CONTROL_ADDRESS}=0.0.0.0:PORT  (vLLM's own port plus 1, or pool.control_port)\n"
        f"  {OPEN_ROUTES}=1\n"
        f"  --middleware {MIDDLEWARE}\n"
        "and, if it sets VLLM_PLUGINS, the name `appliance` in it"
    )


def _copy(directory: Path) -> None:
    """Copy the package with metadata by which vLLM finds the plugin; a second call replaces the first."""
    installed = distribution(DISTRIBUTION)
    package = Path(appliance.__file__).parent
    copied = directory / package.name
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(
        *(package, copied), copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("__pycache__")
    )
    metadata = directory / f"sovereign_appliance-{installed.version}.dist-info"
    metadata.mkdir(exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {installed.version}\n"
    (metadata / "METADATA").write_text(about, encoding="utf-8")
    plugins = "".join(
        f"{each.name} = {each.value}\n" for each in installed.entry_points.select(group=PLUGINS)
    )
    (metadata / "entry_points.txt").write_text(f"[{PLUGINS}]\n{plugins}", encoding="utf-8")
    for path in (copied, metadata, *copied.rglob("*"), *metadata.iterdir()):
        path.chmod(ALL_MAY_READ[path.is_dir()])
