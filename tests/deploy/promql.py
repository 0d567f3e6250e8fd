"""
Which metrics and labels a query may name, and whether it does.

A small checker of PromQL: it works out the labels of every part of an expression, from those of the metrics
in it, and finds a label that is asked for and cannot be there.  Such a query is valid, and finds nothing
for ever.
"""

from collections.abc import Mapping

import promql_parser as promql

Labels = frozenset[str]
TARGET = frozenset({"cluster", "namespace", "job", "instance"})
"""
Labels that Prometheus adds to every series; outside of Kubernetes the namespace is empty.

`cluster` is an external label: only a store of several Prometheus servers has it.
"""
SUBSTITUTES = {
    "$__rate_interval": "1m",
    "$__interval": "15s",
    "$__range": "1h",
    "$price": "2.50",
    **dict.fromkeys(
        ("$cluster", "$namespace", "$job", "$worker", "$model", "$tenant", "$instance", "$Hostname"), ".*"
    ),
}
"""What Grafana puts in the place of its variables, where all is chosen."""


class QueryError(AssertionError):
    """A query that cannot mean what it says."""


def filled_in(expr: str, interval: str = "1m") -> str:
    """The query as Prometheus gets it from Grafana; no variable is left."""
    for name, value in {**SUBSTITUTES, "$__rate_interval": interval}.items():
        expr = expr.replace(name, value)
    if "$" in expr:
        raise QueryError(f"an unknown variable: {expr}")
    return expr


def labels_of(expr: promql.Expr, known: Mapping[str, Labels]) -> Labels:
    """
    The labels that the result of an expression can have.

    Raises:
        QueryError: it names a metric that does not exist, or a label that cannot be there.
    """
    match expr:
        case promql.VectorSelector():
            has = _of_selector(expr, known)
        case promql.MatrixSelector():
            has = _of_selector(expr.vector_selector, known)
        case promql.SubqueryExpr() | promql.ParenExpr() | promql.UnaryExpr():
            has = labels_of(expr.expr, known)
        case promql.AggregateExpr():
            has = _of_aggregate(expr, known)
        case promql.BinaryExpr():
            has = _of_binary(expr, known)
        case promql.Call():
            has = _of_call(expr, known)
        case promql.NumberLiteral() | promql.StringLiteral():
            has = frozenset()
        case _:
            raise QueryError(f"not understood: {expr}")
    return has


def _of_selector(selector: promql.VectorSelector, known: Mapping[str, Labels]) -> Labels:
    if selector.name not in known:
        raise QueryError(f"there is no metric {selector.name}")
    has = known[selector.name]
    _insist({matcher.name for matcher in selector.matchers.matchers}, has, selector.name)
    return has


def _of_aggregate(expr: promql.AggregateExpr, known: Mapping[str, Labels]) -> Labels:
    has = labels_of(expr.expr, known)
    if str(expr.op) in {"topk", "bottomk"}:
        return has
    if expr.modifier is None:
        return frozenset()
    named = frozenset(expr.modifier.labels)
    _insist(named, has, str(expr))
    return named if expr.modifier.type == promql.AggModifierType.By else has - named


def _of_binary(expr: promql.BinaryExpr, known: Mapping[str, Labels]) -> Labels:
    left, right = labels_of(expr.lhs, known), labels_of(expr.rhs, known)
    on: Labels | None = None
    matching = expr.modifier.matching if expr.modifier is not None else None
    if matching is not None:
        on = frozenset(matching.labels)
        _insist(on, left, str(expr.lhs))
        # `or on() vector(0)` is the way to say: this, or 0 if there is nothing.
        _insist(on, right, str(expr.rhs))
    kind = str(expr.op)
    scalar = isinstance(expr.lhs, promql.NumberLiteral) or isinstance(expr.rhs, promql.NumberLiteral)
    if kind in {"and", "unless", "or"} or scalar or not left or not right:
        return left | right if kind == "or" or not left else left
    if on is None and left != right:
        raise QueryError(f"the two sides never match, {set(left)} and {set(right)}: {expr}")
    return left if on is None else on


def _of_call(expr: promql.Call, known: Mapping[str, Labels]) -> Labels:
    parts = [labels_of(argument, known) for argument in expr.args]
    has = frozenset().union(*parts)
    if expr.func.name == "histogram_quantile":
        _insist({"le"}, has, str(expr))
        return has - {"le"}
    if expr.func.name == "label_replace":
        _insist({expr.args[3].val}, has, str(expr))
        return has | {expr.args[1].val}
    if expr.func.name in {"absent", "absent_over_time"}:
        return frozenset()
    return has


def _insist(wanted: frozenset[str] | set[str], has: Labels, where: str) -> None:
    if missing := set(wanted) - has:
        raise QueryError(f"no label {', '.join(sorted(missing))} on {where}")
