"""
A Helm 4 engine and the stand-in for a cluster that it talks to.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart import schemas
from tests.deploy.chart.api_server import EXTENSIONS, ApiServer
from tests.deploy.chart.helm import CHART, NAMESPACE, RELEASE

PROGRAM = Path(__file__).with_name("engine.py")
SECONDS = 120


class EngineRefusedError(Exception):
    """The Helm engine failed; the text is its error."""


class Cluster:
    """`url` is set once the server listens."""

    def __init__(self, engine: Path) -> None:
        """`engine` is the Python that has it; the cluster knows every custom resource of the chart."""
        version = schemas.VERSIONS[-1]
        self.engine = engine
        self.url = ""
        self.server = ApiServer(
            version=version, admit=lambda sent: schemas.faults(sent, version), extensions=EXTENSIONS
        )

    async def helm(self, action: str, **arguments: Any) -> Any:
        """One action, such as `install`; raises `EngineRefusedError`."""
        if action in {"install", "upgrade"}:
            arguments = {
                "chart_path": str(CHART),
                "wait": True,
                "timeout": SECONDS // 2,
                "server_side_apply": True,
            } | arguments
            arguments["disable_openapi_validation"] = False
        process = await asyncio.create_subprocess_exec(
            self.engine,
            PROGRAM,
            action,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        asked = {
            "namespace": NAMESPACE,
            "kubeconfig": self._kubeconfig(),
            "arguments": {"release_name": RELEASE} | arguments,
        }
        try:
            output, complaint = await asyncio.wait_for(
                process.communicate(json.dumps(asked).encode()), SECONDS
            )
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert not self.server.unserved, f"the stand-in does not speak {self.server.unserved}"
        if process.returncode:
            raise EngineRefusedError(complaint.decode())
        return json.loads(output)

    def _kubeconfig(self) -> str:
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "stand-in", "cluster": {"server": self.url}}],
                "users": [{"name": "nobody", "user": {}}],
                "contexts": [{"name": "here", "context": {"cluster": "stand-in", "user": "nobody"}}],
                "current-context": "here",
            },
            sort_keys=False,
        )
