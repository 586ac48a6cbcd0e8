"""Helm for tests: a request a line comes in, its answer a line goes out, both JSON.

Helm's own engine, as a library in a process of its own: its Go runtime starts threads, and a
process with threads must not fork.
"""

import json
import sys
from typing import Any

import helm_python


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Render a chart, or lint it; return the templates' texts, or findings, or the error."""
    chart = request["chart"]
    try:
        if request["verb"] == "lint":
            return {"lint": helm_python.lint(chart, request["values"], strict=True)}
        with helm_python.Chart.load(chart) as loaded:
            loaded.validate_schema(request["values"])
            names = {"name": request["name"], "namespace": request["namespace"]}
            return {"files": loaded.render(request["values"], **names)}
    except helm_python.HelmError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
