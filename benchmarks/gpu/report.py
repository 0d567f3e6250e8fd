"""
The report of all steps, and its plot.  Pure.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from appliance.infra import svg
from benchmarks.gpu.steps import Step
from benchmarks.gpu.workers import follows
from benchmarks.speculation.records import table

Results = Mapping[str, Mapping[str, Any]]
Curves = dict[str, list[tuple[int, float]]]
"""Points of concurrency and value, by name."""
COLOURS = ("#000000", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#d55e00")
"""After Okabe and Ito, who chose colours that most eyes can tell apart."""
WIDTH, HEIGHT, MARGIN, TICKS = 330, 200, 50, 4


def report(steps: Sequence[Step], results: Results, failures: Mapping[str, str]) -> str:
    """Everything that was found, and what was not."""
    lines = ["# The appliance on a GPU", "", *_machine(results), ""]
    rows = [(f"`{step.name}`", *_state(step.name, results, failures)) for step in steps]
    lines += [*table(("step", "state", "seconds, last slice"), rows), ""]
    for part in (_plugin, _training, _paired, _drill, _costs):
        lines += part(results)
    for name, reason in failures.items():
        lines += ["", f"## `{name}` failed", "", "```", reason.replace("```", "'''"), "```"]
    return "\n".join(lines).rstrip() + "\n"


def _state(name: str, results: Results, failures: Mapping[str, str]) -> tuple[str, str]:
    if name not in results:
        return "failed" if name in failures else "not run", ""
    skipped = results[name]["found"].get("skipped")
    return f"not run: {skipped}" if skipped else "done", f"{results[name]['seconds']:.0f}"


def _machine(results: Results) -> list[str]:
    """One line for each machine, commit and command."""
    found: dict[str, list[str]] = {}
    for name, result in results.items():
        machine = result["machine"]
        changed = " with uncommitted changes" if machine["has_changes"] else ""
        commit = f"commit {machine['commit']}{changed}"
        line = f"{machine['hardware']}; {commit}; {machine['date']}; `{machine['command']}`"
        found.setdefault(line, []).append(name)
    versions = results["check"]["found"] if "check" in results else {}
    software = [f"- vLLM {versions['vllm']}, torch {versions['torch']}"] if versions else []
    return [*software, *(f"- {', '.join(names)}: {line}" for line, names in found.items())]


def _plugin(results: Results) -> list[str]:
    lines = []
    for runner in (1, 2):
        found = results.get(f"plugin-v{runner}", {}).get("found", {})
        if "tables" not in found:
            continue
        state = "controls the worker" if found["controllable"] else f"cannot control it: {found['problems']}"
        if found["runner"] != runner:
            state += f", but the worker ran on V{found['runner']}"
        lines += ["", f"V{runner} model runner: the plugin {state}.", ""]
        rows = [
            (
                f"K={check['draft_tokens']}",
                "yes" if follows(check) else "**no**",
                ", ".join(f"K={k}: {count}" for k, count in check["steps"].items()),
                f"{check['acceptance_length']:.2f}" if check["draft_tokens"] else "",
            )
            for check in found["tables"]
        ]
        lines += table(("table", "followed", "steps", "acceptance length"), rows)
    about = "The committed demo pair, held-out code, greedy."
    return ["## The plugin", "", about, *lines, ""] if lines else []


def _training(results: Results) -> list[str]:
    if "target" not in results:
        return []
    target = results["target"]["found"]
    trained = f"{target['steps']} steps of {target['batch']} x {target['window']} tokens"
    lines = [
        "## The trained pair",
        "",
        f"Target: {target['parameters'] / 1e6:.1f} M parameters, {trained}: {target['reached']}.",
    ]
    if "draft" in results:
        draft = results["draft"]["found"]
        lines.append(
            f"Draft: {draft['rounds']} rounds of {draft['steps']} steps of {draft['batch']} windows: "
            f"{draft['reached']}."
        )
    return [*lines, ""]


def _paired(results: Results) -> list[str]:
    if "paired" not in results:
        return []
    text = str(results["paired"]["found"]["report"])
    deeper = [f"#{line}" if line.startswith("#") else line for line in text.splitlines()]
    plot = "![Speed by concurrency](paired.svg)"
    return ["## Paired measurements", "", *deeper, "", plot, ""]


def _drill(results: Results) -> list[str]:
    if "drill" not in results:
        return []
    found = results["drill"]["found"]
    lines = ["## The drill", "", f"Verdict: {found['verdict']}."]
    lines += [f"- {problem}" for problem in found["problems"]]
    for stage in ("fallback", "recovery"):
        if (seconds := found[f"seconds_to_{stage}"]) is not None:
            lines.append(f"{stage.capitalize()} after {seconds:.1f} s.")
    return [*lines, ""]


def costs_of(results: Results) -> dict[str, tuple[Mapping[str, Any], dict[tuple[int, int], float]]]:
    """
    Seconds of a step by (concurrency, K) for each shape at its own depth.

    Layers cost the same, so that the cost at a depth that was not served is linear in two that were.
    """
    by_shape: dict[str, list[Mapping[str, Any]]] = {}
    for name, result in results.items():
        if name.startswith("costs-"):
            by_shape.setdefault(result["found"]["shape"], []).append(result["found"])
    found = {}
    for shape, runs in by_shape.items():
        runs.sort(key=lambda run: run["depth"])
        at = [
            {
                (row["concurrency"], row["draft_tokens"]): row["seconds"]
                for row in run["costs"]
                if row["steps"]
            }
            for run in runs
        ]
        last = runs[-1]
        if last["depth"] == last["layers"]:
            found[shape] = last, at[-1]
        elif len(runs) > 1:
            share = (last["layers"] - last["depth"]) / (last["depth"] - runs[-2]["depth"])
            grown = {
                key: seconds + share * (seconds - at[-2][key])
                for key, seconds in at[-1].items()
                if key in at[-2]
            }
            found[shape] = last, grown
    return found


def _costs(results: Results) -> list[str]:
    lines = []
    for shape, (run, seconds) in costs_of(results).items():
        ks = sorted({k for _concurrency, k in seconds})
        synthetic = f"synthetic acceptance length {run['synthetic']}" if run["synthetic"] else "no acceptance"
        grown = "" if run["depth"] == run["layers"] else ", extrapolated from two smaller depths"
        lines += ["", f"### {shape}, {run['layers']} layers{grown}", "", f"Random weights, {synthetic}.", ""]
        names = ["C", *(f"K={k}, ms" for k in ks), *(f"K={k} pays above" for k in ks[1:])]
        rows = []
        for concurrency in sorted({concurrency for concurrency, _k in seconds}):
            row = [seconds.get((concurrency, k)) for k in ks]
            times = ["" if value is None else f"{1000 * value:.2f}" for value in row]
            pays = ["" if value is None or not row[0] else f"{value / row[0]:.2f}" for value in row[1:]]
            rows.append((str(concurrency), *times, *pays))
        lines += table(names, rows)
    if not lines:
        return []
    about = (
        "Mean time of an engine step in which all requests decode.  K pays if the acceptance length is above "
        "the cost of its step over that of K=0."
    )
    return ["## Costs of steps", "", about, *lines, "", "![Costs of steps](step-costs.svg)", ""]


def plots(results: Results) -> dict[str, str]:
    """SVG files by name."""
    found = {}
    if "paired" in results:
        rows = results["paired"]["found"]["speeds"]
        none = {row["concurrency"]: row["speed"] for row in rows if row["mode"] == "K=0"}
        curves: Curves = {}
        for row in rows:
            at = row["concurrency"]
            if none.get(at):
                curves.setdefault(row["mode"], []).append((at, row["speed"] / none[at]))
        found["paired.svg"] = drawn([panel("tokens/s, times those of K=0", curves)])
    panels = []
    for shape, (_run, seconds) in costs_of(results).items():
        times: Curves = {}
        pays: Curves = {}
        for (concurrency, k), taken in sorted(seconds.items()):
            times.setdefault(f"K={k}", []).append((concurrency, 1000 * taken))
            if k and (concurrency, 0) in seconds:
                pays.setdefault(f"K={k}", []).append((concurrency, taken / seconds[concurrency, 0]))
        panels += [panel(f"{shape}: ms per step", times), panel(f"{shape}: K pays above", pays)]
    if panels:
        found["step-costs.svg"] = drawn(panels)
    return found


def drawn(panels: Sequence[Markup]) -> str:
    placed = [
        svg.element("g", each, transform=f"translate({at % 2 * WIDTH} {at // 2 * HEIGHT})")
        for at, each in enumerate(panels)
    ]
    size = {"width": min(2, len(panels)) * WIDTH, "height": (len(panels) + 1) // 2 * HEIGHT}
    return svg.element(
        "svg",
        svg.element("rect", **size, fill="#fff"),
        *placed,
        **size,
        xmlns="http://www.w3.org/2000/svg",
        font_family="sans-serif",
        font_size=11,
    )


def panel(title: str, curves: Curves) -> Markup:
    """Curves over a doubling number of concurrent requests, from 0."""
    points = [point for curve in curves.values() for point in curve]
    across = sorted({x for x, _y in points})
    top = max((y for _x, y in points), default=1.0) * 1.05 or 1.0
    spread = math.log2(across[-1] / across[0]) or 1.0 if across else 1.0

    def place(x: int, y: float) -> tuple[float, float]:
        right = math.log2(x / across[0]) / spread * (WIDTH - 2 * MARGIN)
        return MARGIN + right, HEIGHT - 40 - y / top * (HEIGHT - 80)

    parts = [svg.label(MARGIN, 14, title, font_weight="bold")]
    for value in (top * tick / TICKS for tick in range(TICKS + 1) if across):
        height = place(across[0], value)[1]
        parts.append(svg.line(MARGIN, height, WIDTH - MARGIN, height, stroke="#ddd"))
        parts.append(svg.label(MARGIN - 6, height + 4, f"{value:.3g}", text_anchor="end"))
    parts += [svg.label(place(x, 0)[0], HEIGHT - 24, f"{x}", text_anchor="middle") for x in across]
    parts.append(svg.label(WIDTH / 2, HEIGHT - 8, "concurrent requests", text_anchor="middle"))
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = svg.points([place(*point) for point in curve])
        parts.append(svg.element("polyline", points=line, fill="none", stroke=colour, stroke_width=2))
        parts.append(svg.label(MARGIN + number * 48, 30, name, fill=colour))
    return svg.element("g", *parts)
