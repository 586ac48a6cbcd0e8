"""The chart as its tests see it: the objects that values make."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.helm.generate import CHART

WORKER = Path(__file__).with_name("helm_worker.py")
Object = dict[str, Any]
Values = Mapping[str, Any]
NAMESPACE = "llm"
RELEASE = "demo"
NAME = "demo-shoal"
NEEDED: Values = {"image": {"repository": "shoal"}, "model": {"name": "org/model"}}
"""What the chart refuses to be without, unless it serves the demo."""


def with_needed(values: Values) -> Values:
    """Return values with those that the chart needs, but for the demo's."""
    if values.get("demo"):
        return values
    return {**values, **{part: {**NEEDED[part], **values.get(part, {})} for part in NEEDED}}


class ChartError(Exception):
    """Helm renders nothing; the message says why."""


class Objects:
    """What a release consists of."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.notes = files["shoal/templates/NOTES.txt"]
        self.all: list[Object] = [
            document
            for name, text in sorted(files.items())
            if name.endswith(".yaml")
            for document in yaml.load_all(text, yaml.CSafeLoader)  # in a tenth of the time
            if document is not None
        ]

    def of(self, kind: str) -> list[Object]:
        """Return all objects of a kind."""
        return [one for one in self.all if one["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Object:
        """Return the only object of a kind, or of a kind and name."""
        (found,) = [one for one in self.of(kind) if name in (None, one["metadata"]["name"])]
        return found

    @property
    def pod(self) -> Object:
        """The pod template."""
        template: Object = self.one("StatefulSet")["spec"]["template"]
        return template

    @property
    def container(self) -> Object:
        """The only container of a pod."""
        (found,) = self.pod["spec"]["containers"]
        return dict(found)

    @property
    def args(self) -> list[str]:
        """The arguments of ``shoal``."""
        return list(self.container["args"])

    @property
    def volumes(self) -> dict[str, Object]:
        """Volumes of a pod by name."""
        return {volume["name"]: volume for volume in self.pod["spec"]["volumes"]}

    @property
    def mounts(self) -> dict[str, Object]:
        """Mounts of the container by the volume's name."""
        return {mount["name"]: mount for mount in self.container["volumeMounts"]}


class Helm:
    """Helm in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()

    def render(self, values: Values | None = None, name: str = RELEASE) -> Objects:
        """Return what ``helm install NAME`` would make of these values and those that it needs.

        Raises:
            ChartError: the values are wrong.
        """
        return self.render_only(with_needed(values or {}), name)

    def render_only(self, values: Values, name: str = RELEASE) -> Objects:
        """Return what ``helm install NAME`` would make of these values alone.

        Raises:
            ChartError: the values are wrong.
        """
        answer = self._ask(verb="render", values=values, name=name, namespace=NAMESPACE)
        if "error" in answer:
            raise ChartError(answer["error"])
        return Objects(answer["files"])

    def lint(self, values: Values) -> Iterator[str]:
        """Yield what ``helm lint --strict`` finds."""
        report = self._ask(verb="lint", values=with_needed(values))["lint"]
        yield from report["errors"]
        warning = 2
        for message in report["messages"]:
            if message["severity"] >= warning:
                yield f"{message['path']}: {message['error']}"

    def _ask(self, **request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"chart": str(CHART), **request}), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer
