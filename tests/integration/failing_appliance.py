"""`appliance`, with a worker whose first suitable step fails (`failing/sitecustomize.py`)."""

from pathlib import Path

from appliance.app import worker_process
from appliance.cli import main

offline_environment = worker_process.offline_environment


def failing_environment(*arguments, **named):
    """A worker's environment, which has no PYTHONPATH otherwise."""
    return {**offline_environment(*arguments, **named), "PYTHONPATH": str(Path(__file__).parent / "failing")}


worker_process.offline_environment = failing_environment
main()
