"""
Write every dashboard to `deploy/monitoring/dashboards`.
"""

import json
from pathlib import Path

from deploy.monitoring.source.audit import AUDIT
from deploy.monitoring.source.overview import OVERVIEW
from deploy.monitoring.source.panels import Dashboard
from deploy.monitoring.source.speculation import SPECULATION
from deploy.monitoring.source.tenants import TENANTS_AND_COST
from deploy.monitoring.source.worker import WORKER_DETAIL

ALL = (OVERVIEW, SPECULATION, TENANTS_AND_COST, AUDIT, WORKER_DETAIL)
WRITTEN_TO = Path(__file__).resolve().parent.parent / "dashboards"


def rendered(dashboard: Dashboard) -> str:
    """The file of a dashboard."""
    return json.dumps(dashboard.json(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all files, and remove those of deleted dashboards."""
    WRITTEN_TO.mkdir(exist_ok=True)
    wanted = {WRITTEN_TO / f"{dashboard.uid}.json": rendered(dashboard) for dashboard in ALL}
    for file in WRITTEN_TO.glob("*.json"):
        if file not in wanted:
            file.unlink()
    for file, text in wanted.items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
