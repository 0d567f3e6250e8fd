"""The command line gives a worker the collector's endpoint."""

from pathlib import Path

import pytest

from appliance.errors import ConfigurationError
from appliance.infra.settings import TracingSettings, WorkerSettings
from appliance.serving.devices import Device, DeviceKind
from appliance.serving.launch import check_extra_arguments, plan_launch
from appliance.serving.weights import Weights

FLAG = "--otlp-traces-endpoint"


def command(tracing: TracingSettings | None, *extra: str) -> tuple[str, ...]:
    return plan_launch(
        WorkerSettings(method="none", extra_arguments=extra),
        python="/python",
        port=8000,
        device=Device(kind=DeviceKind.CPU, count=1, bfloat16=False),
        target=Weights(path=Path("/models/one"), config={}, tensors={}),
        draft=None,
        environment={},
        control_token_file=Path("/control.token"),
        tracing=tracing,
    ).argv


def test_the_collector_is_an_argument():
    argv = command(TracingSettings(enabled=True))
    assert argv[argv.index(FLAG) + 1] == "http://127.0.0.1:4318/v1/traces"
    assert command(TracingSettings()) == command(None)
    assert FLAG not in command(None)


def test_a_headless_node_traces_nothing():
    """Requests are traced where they arrive."""
    assert FLAG not in command(TracingSettings(enabled=True), "--nnodes", "2", "--headless")


@pytest.mark.parametrize(
    "argument", [FLAG, "--otlp_traces_endpoint=http://8.8.8.8", "--collect-detailed-traces"]
)
def test_extra_arguments_cannot_set_the_endpoint(argument):
    with pytest.raises(ConfigurationError, match="is refused"):
        check_extra_arguments((argument,))
