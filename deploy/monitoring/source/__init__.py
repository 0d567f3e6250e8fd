"""
The dashboards, as Python: `python -m deploy.monitoring.source` writes `deploy/monitoring/dashboards`.

Grafana's JSON repeats itself; here each panel says what it asks, in which unit, and what it means.
"""
