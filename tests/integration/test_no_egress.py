"""
No egress: the whole appliance in an empty network namespace, every connection of it traced; and a start
or a request that points outside is refused, with the reason.
"""

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.sovereignty.landlock import NETWORK_ABI, abi_version
from tests.integration.enclave import REPORT

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 900
UNSHARE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
ADDRESS = re.compile(
    r"sa_family=AF_INET6?, sin6?_port=htons\((?P<port>\d+)\), (?:sin6_flowinfo=\S+ )?"
    r"(?:sin_addr=inet_addr\(|inet_pton\(AF_INET6, )\"(?P<host>[^\"]+)\""
)
FAMILY = re.compile(r"sa_family=(AF_\w+)")


def peers(trace: str) -> set[tuple[str, int]]:
    """Every internet address that a trace names."""
    return {(found["host"], int(found["port"])) for found in ADDRESS.finditer(trace)}


def strangers(trace: str) -> list[str]:
    """Trace lines with an address outside this machine, or of an unknown kind."""
    found = []
    for line in trace.splitlines():
        named = FAMILY.findall(line)
        internet = [family for family in named if family in {"AF_INET", "AF_INET6"}]
        local = all(ipaddress.ip_address(host).is_loopback for host, _ in peers(line))
        unknown = set(named) - {"AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_UNSPEC"}
        if unknown or not local or len(internet) != len(ADDRESS.findall(line)):
            found.append(line)
    return found


@pytest.fixture(scope="module")
def enclave(tmp_path_factory) -> tuple[dict, str]:
    """What happened inside, and the trace; one run for all tests."""
    if shutil.which("strace") is None:
        pytest.skip("SKIPPED THE NO-EGRESS PROOF: strace is missing")
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("SKIPPED THE NO-EGRESS PROOF: this machine does not allow network namespaces")
    directory = tmp_path_factory.mktemp("enclave")
    ended = subprocess.run(
        [*UNSHARE, sys.executable, "-m", "tests.integration.enclave", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    report = json.loads((directory / REPORT).read_text(encoding="utf-8"))
    return report, (directory / "trace").read_text(encoding="utf-8")


@pytest.fixture
def report(enclave) -> dict:
    return enclave[0]


@pytest.fixture
def trace(enclave) -> str:
    return enclave[1]


@pytest.mark.worker
def test_the_namespace_was_empty(report):
    """Or what follows would prove nothing: loopback alone, and no route to anywhere."""
    assert report["up"] == ["lo"]
    assert report["outside"] == "ENETUNREACH"


@pytest.mark.worker
def test_a_whole_chat_is_served_in_it(report):
    """Start of the worker included, as a whole and as a stream, and the log of it verifies."""
    for status, text in (report["chat"], report["stream"]):
        assert status == 200, text
    assert json.loads(report["chat"][1])["choices"][0]["message"]["content"]
    assert report["stream"][1].endswith("data: [DONE]\n\n")
    assert report["verify"][0] == 0, report["verify"][1]
    assert report["exit"] == 0, report["output"][-2000:]


@pytest.mark.worker
def test_every_connection_went_to_this_machine(trace):
    """Of the gateway, its control loop, the worker and all that vLLM starts."""
    assert strangers(trace) == []


@pytest.mark.worker
def test_the_trace_saw_gateway_and_worker(report, trace):
    """So the empty result is significant: the trace has vLLM's processes and the gateway's calls to them."""
    names = set(re.findall(r"^\d+<([^>]+)>", trace, re.MULTILINE))
    assert any(name.startswith("VLLM::") for name in names), names
    assert "python" in names
    asked = re.search(r"^wall: TCP connections only to ports (\d+)$", report["output"], re.MULTILINE)
    if asked is not None:
        assert peers(trace) == {("127.0.0.1", int(asked[1]))}
    else:
        assert peers(trace)


@pytest.mark.worker
def test_wall_is_up_and_reported(report):
    """In the log, in the metrics and in `appliance status`; one port, of the worker."""
    try:
        version = abi_version()
    except OSError:
        version = 0
    if version < NETWORK_ABI:
        pytest.skip("SKIPPED THE WALL: this kernel's Landlock does not know ports")
    assert "wall: TCP connections only to ports " in report["output"]
    assert "\nappliance_wall_up 1.0\n" in report["metrics"][1]
    assert "TCP connections only to" in report["status"][1], report["status"][1]


@pytest.mark.worker
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_picture_by_url_is_refused(report, dialect):
    """With a reason, in every dialect."""
    status, text = report["hostile"][dialect]
    assert status == 400
    assert "fetches nothing from the network" in json.loads(text)["error"]["message"]


# A start with a setting that points outside.


HOSTILE = {
    "VLLM_NO_USAGE_STATS": ("0", "vLLM sends usage statistics unless this is exactly 1"),
    "DO_NOT_TRACK": ("true", "send telemetry unless this is exactly 1"),
    "HF_HUB_OFFLINE": ("0", "looks for files on the network"),
    "HTTPS_PROXY": ("http://proxy.example:3128", "requests would be sent through a proxy"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": ("http://collector.example:4317", "traces and metrics would be sent"),
    "APPLIANCE_WORKER__EXTRA_ARGUMENTS": ('["--otlp-traces-endpoint", "x"]', "send data out"),
}
"""Variables with a value that is refused, and the reason that is given."""
STARTS = """
import json, os, sys
from appliance.cli import main
hostile = json.loads(sys.argv.pop())
environment = dict(os.environ)
for variable, value in hostile.items():
    os.environ[variable] = value
    try:
        main()
    except SystemExit as end:
        print(json.dumps([variable, end.code]), file=sys.stderr)
    os.environ.clear()
    os.environ.update(environment)
"""
"""Runs its arguments with each of the variables in turn: the imports take longer than all else."""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and last line of a start with each hostile variable."""
    words = [
        "up",
        "--data",
        str(tmp_path_factory.mktemp("hostile") / "data"),
        "--port",
        "0",
        "--admin-port",
        "0",
    ]
    values = json.dumps({variable: value for variable, (value, _) in HOSTILE.items()})
    ended = subprocess.run(
        [sys.executable, "-c", STARTS, *words, values],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    lines = ended.stderr.splitlines()
    ends = [(number, json.loads(line)) for number, line in enumerate(lines) if line.startswith('["')]
    return {variable: (code, lines[number - 1]) for number, (variable, code) in ends}


@pytest.mark.parametrize("variable", HOSTILE)
def test_a_hostile_setting_is_refused(refusals, variable):
    """Nothing starts, and one line says which and why."""
    code, last = refusals[variable]
    assert code == 1
    assert last.startswith("appliance: ")
    assert HOSTILE[variable][1] in last


# The trace reader itself.

HERE = 'sa_family=AF_INET, sin_port=htons(8000), sin_addr=inet_addr("127.0.0.1")'
HERE_6 = 'sa_family=AF_INET6, sin6_port=htons(8000), sin6_flowinfo=htonl(0), inet_pton(AF_INET6, "::1", &a)'
THERE = 'sa_family=AF_INET, sin_port=htons(443), sin_addr=inet_addr("192.0.2.1")'
THERE_6 = HERE_6.replace("::1", "2001:db8::1")
OUTSIDE_LINES = [
    f"7 connect(9, {{{THERE}}}, 16) = 0",
    f"7 connect(9, {{{THERE_6}, sin6_scope_id=0}}, 28) = -1 ENETUNREACH (Network is unreachable)",
    f'7 sendto(9, ""..., 40, 0, {{{THERE}}}, 16) = 40',
    f"7 sendmsg(9, {{msg_name={{{THERE}}}, msg_namelen=16}}, 0) = 1",
    f"7 sendmmsg(9, [{{msg_hdr={{msg_name={{{HERE}}}}}}}, {{msg_hdr={{msg_name={{{THERE}}}}}}}], 2, 0) = 2",
    "7 connect(9, {sa_family=AF_VSOCK, svm_cid=2}, 16) = 0",
    "7 connect(9, {sa_family=AF_INET, something this expression cannot read}, 16) = 0",
]
LOCAL_LINES = [
    f"7 connect(9, {{{HERE}}}, 16) = 0",
    f"7 connect(9, {{{HERE_6}, sin6_scope_id=0}}, 28) = 0",
    '7 connect(9, {sa_family=AF_UNIX, sun_path="/tmp/x"}, 110) = 0',
    '7 sendto(9, ""..., 40, MSG_NOSIGNAL, NULL, 0) = 40',
    "7 sendmsg(9, {msg_name={sa_family=AF_NETLINK, nl_pid=0, nl_groups=00000000}, msg_namelen=12}, 0) = 20",
]


@pytest.mark.parametrize("line", OUTSIDE_LINES)
def test_trace_reader_detects_a_foreign_address(line):
    """For every call and family, and also if it cannot read the address."""
    assert strangers("\n".join([*LOCAL_LINES, line])) == [line]


def test_trace_reader_accepts_local_addresses():
    """Loopback, Unix sockets and the kernel's own."""
    assert strangers("\n".join(LOCAL_LINES)) == []
    assert peers("\n".join(LOCAL_LINES)) == {("127.0.0.1", 8000), ("::1", 8000)}
