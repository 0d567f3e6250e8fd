"""The sovereign serving appliance."""

from importlib.metadata import version

__version__ = version("sovereign-appliance")
