"""The account that runs this process, for the audit log."""

import os
import pwd
from collections.abc import Callable


def account_name(uid: Callable[[], int] = os.getuid) -> str:
    """Name of the account this process runs as: from the kernel, not the environment."""
    number = uid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid-{number}"
