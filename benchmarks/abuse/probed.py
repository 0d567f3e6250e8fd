"""
`appliance gateway`, with a watch on its event loop: the longest CPU time between two looks, 1 ms apart.

CPU time, not time by the clock: on a busy machine the clock says how long the process was not running.
Written to the file that `BENCH_TURNS` names; when that is removed, the watch begins again.
"""

import asyncio
import os
import runpy
import time
from pathlib import Path

from appliance.app import run

WRITE_SECONDS = 0.2


async def watch(file: Path) -> None:
    longest, last, due = 0.0, time.thread_time(), 0.0
    while True:
        await asyncio.sleep(0.001)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
        if time.monotonic() > due:
            due = time.monotonic() + WRITE_SECONDS
            longest = publish(file, longest)


def publish(file: Path, longest: float) -> float:
    if not file.exists():
        longest = 0.0
    draft = file.with_suffix(".new")
    draft.write_text(str(longest), encoding="ascii")
    draft.replace(file)
    return longest


def main() -> None:
    freeze, tasks = run._freeze_gc, set[object]()  # noqa: SLF001 - called once everything runs

    def started() -> None:
        freeze()
        tasks.add(asyncio.ensure_future(watch(Path(os.environ["BENCH_TURNS"]))))

    run._freeze_gc = started  # noqa: SLF001 - as above
    runpy.run_module("appliance", run_name="__main__")


if __name__ == "__main__":
    main()
