"""When the wall is raised, when a start continues without it, and when the start is refused."""

import errno

import pytest

from appliance.errors import ConfigurationError
from appliance.infra.settings import SovereigntySettings, load_settings
from appliance.sovereignty.wall import NO_WALL, raise_wall

PORTS = frozenset({8000, 5432})


class Kernel:
    """A kernel with some version of Landlock, or none."""

    def __init__(self, version: int = 4, *, asked: int | None = None, confining: int | None = None) -> None:
        self.version, self.asked, self.confining = version, asked, confining
        self.allowed: list[int] | None = None

    def abi_version(self) -> int:
        if self.asked is not None:
            raise OSError(self.asked, "said the kernel")
        return self.version

    def allow_connections(self, ports) -> None:
        if self.confining is not None:
            raise OSError(self.confining, "threads are running already")
        self.allowed = list(ports)


CANNOT = [
    (Kernel(3), "version 3"),
    (Kernel(asked=errno.ENOSYS), "no Landlock"),
    (Kernel(asked=errno.EOPNOTSUPP), "switched off"),
    (Kernel(asked=errno.EPERM), "seccomp"),
    (Kernel(confining=errno.EBUSY), "threads are running already"),
]


@pytest.mark.parametrize("mode", ["on", "required"])
@pytest.mark.parametrize("version", [4, 7])
def test_is_raised_where_the_kernel_can(mode, version):
    """The kernel gets the ports, and the operator a line with them."""
    kernel = Kernel(version)
    wall = raise_wall(mode, PORTS, kernel)
    assert kernel.allowed == [5432, 8000]
    assert wall.is_up
    assert wall.detail == "TCP connections only to ports 5432, 8000"


def test_wall_without_ports_blocks_everything():
    """A wall without doors is a wall too."""
    assert raise_wall("on", frozenset(), Kernel()).detail == "TCP connections nowhere"


@pytest.mark.parametrize(("kernel", "reason"), CANNOT)
def test_start_continues_without_a_wall_and_reports_why(kernel, reason):
    """An older kernel does not stop the start unless the settings require the wall."""
    wall = raise_wall("on", PORTS, kernel)
    assert not wall.is_up
    assert reason in wall.detail
    assert "\n" not in wall.detail
    assert reason in wall.warning


@pytest.mark.parametrize(("kernel", "reason"), CANNOT)
def test_required_refuses_to_start_without(kernel, reason):
    """Who requires it would rather not serve."""
    with pytest.raises(ConfigurationError, match=reason) as refusal:
        raise_wall("required", PORTS, kernel)
    assert str(refusal.value).startswith("sovereignty.wall is required")


def test_off_asks_the_kernel_for_nothing():
    """And the line says that the settings chose it."""
    kernel = Kernel()
    wall = raise_wall("off", PORTS, kernel)
    assert kernel.allowed is None
    assert not wall.is_up
    assert "sovereignty.wall" in wall.detail
    assert wall.warning is None


def test_blocked_port_is_refused_by_name():
    """Rather than by workers that never become healthy."""
    wall = raise_wall("on", PORTS, Kernel())
    wall.check({8000}, "pool")
    with pytest.raises(ConfigurationError, match=r"pool: port 9000 is blocked .*sovereignty\.connect_ports"):
        wall.check({8000, 9000}, "pool")


def test_every_port_is_allowed_without_a_wall():
    """Nothing is refused that would work."""
    NO_WALL.check({9000}, "pool")


@pytest.mark.parametrize(("text", "mode"), [("on", "on"), ("off", "off"), ("required", "required")])
def test_yaml_may_say_on_and_off(tmp_path, text, mode):
    """YAML reads the bare words as yes and no."""
    file = tmp_path / "appliance.yaml"
    file.write_text(f"sovereignty:\n  wall: {text}\n", encoding="utf-8")
    assert load_settings(file, environment={}).sovereignty.wall == mode
    read = load_settings(environment={"APPLIANCE_SOVEREIGNTY__WALL": text})
    assert read.sovereignty.wall == mode


def test_is_on_by_default():
    """A wall that has to be asked for is not there when it is needed."""
    assert SovereigntySettings().wall == "on"
