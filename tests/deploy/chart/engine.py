"""
One action of the Helm 4 engine, in the environment that has it: `python engine.py ACTION` with JSON on stdin.

Standard library and `helm_sdkpy` only.  Prints the result as JSON, or on stderr one line and exits 1.
"""

import asyncio
import json
import sys

import helm_sdkpy
from helm_sdkpy.chart import Lint, ReleaseTest

ACTIONS = {
    "install": helm_sdkpy.Install,
    "upgrade": helm_sdkpy.Upgrade,
    "rollback": helm_sdkpy.Rollback,
    "uninstall": helm_sdkpy.Uninstall,
    "history": helm_sdkpy.History,
    "status": helm_sdkpy.Status,
    "lint": Lint,
    "test": ReleaseTest,
}


def main() -> int:
    """Stdin holds `namespace`, `kubeconfig` (its text) and `arguments`."""
    asked = json.load(sys.stdin)
    configuration = helm_sdkpy.Configuration(namespace=asked["namespace"], kubeconfig=asked["kubeconfig"])
    try:
        result = asyncio.run(ACTIONS[sys.argv[1]](configuration).run(**asked["arguments"]))
    except helm_sdkpy.HelmError as refused:
        sys.stderr.write(f"{refused}\n")
        return 1
    json.dump(result, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
