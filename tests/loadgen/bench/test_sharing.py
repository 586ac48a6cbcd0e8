"""What is measured and projected of shared weights, against a client that notes what is asked."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from shoal.loadgen.bench import sharing
from shoal.loadgen.bench.dummy_model import FP8_KINDS, in_fp8
from shoal.loadgen.bench.sharing_projected import LONGEST, job, project, systems
from shoal.loadgen.bench.token_client import Answer, RequestFailedError
from shoal.server.errors import UserError

MODEL, CONTEXT = "qwen-2.5-32b-bf16", 864


# --- projected ---


def projected(*batches: int, device: str = "h200", requests: int = 0) -> Any:
    return project(
        MODEL, device, 2, 2, {n: n * CONTEXT for n in batches}, job(requests, 500, 100, seed=1)
    )


def test_small_batches_wait_for_copies_and_large_ones_hide_them() -> None:
    steps = projected(1, 2048).steps
    assert list(steps) == ["DP", "WaS", "TP2"]
    assert steps["WaS"][1] > 2 * steps["DP"][1]
    assert steps["WaS"][2048] == pytest.approx(steps["DP"][2048], rel=0.001)
    assert steps["TP2"][1] < steps["DP"][1], "a group of two engines reads a half of the weights"


def test_a_model_that_is_larger_than_a_gpu_has_only_shared_weights() -> None:
    found = project("codellama-34b-bf16", "l40s", 2, 2, {8: 8}, job(20, 100, 20, seed=1))
    assert list(found.steps) == ["WaS", "TP2"]
    assert found.missing
    assert "DP, whole weights" not in found.jobs
    assert len(found.jobs) == len(systems(2, 2)) - 1


def test_groups_in_the_tail_make_a_job_faster_than_streaming_alone() -> None:
    jobs = projected(1, requests=60).jobs
    assert jobs["WaS and groups (adaptive)"] < jobs["WaS only"]
    assert jobs["DP, whole weights"] < jobs["WaS only"]


def test_a_job_has_outputs_of_a_long_tail() -> None:
    lengths = [request.output_tokens for request in job(4000, 10, 100, seed=0)]
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.1)
    assert min(lengths) >= 1
    assert 5 * 100 < max(lengths) <= LONGEST * 100
    assert job(10, 10, 100, seed=0) != job(10, 10, 100, seed=1)


# --- a real node ---


class Node:
    """In place of a client of a node, whose step times are given."""

    def __init__(self, *, changes: bool = True) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._changes = changes
        self._share, self._units = 2, 2
        self.together = 0

    async def call(self, _method: str, path: str, body: Mapping[str, Any]) -> None:
        self.asked.append((path, *body.values()))
        if path == "/admin/layout":
            self._units = len(body["units"])
        if path == "/admin/memory":
            if not self._changes:
                raise RequestFailedError("/admin/memory answered 409: too small")
            self._share = body["share_weights"]

    async def generate(
        self, prompt: list[int], tokens: int, stream: bool = False, rank: int | None = None
    ) -> Answer:
        self.together += 1
        await asyncio.sleep(0)  # all requests of a batch have been sent
        step = self._units + 10 * self._share + self.together / 1000
        await asyncio.sleep(0)
        self.together = 0
        progress = [(number * step, number + 1) for number in range(tokens)] if stream else []
        return Answer(0.0, tokens * step, progress, "0")


def measured(node: Node, requests: int = 0) -> sharing.Sharing:
    args = sharing._parser().parse_args(
        ["--model-shape", "m", "--batches", "1", "4", "--tokens", "16", "--job", str(requests)]
    )
    args.share_weights = 2
    return asyncio.run(sharing._Measuring(node, args).run())  # type: ignore[arg-type]


def test_a_node_is_measured_at_both_levels_in_all_layouts() -> None:
    node = Node()
    found = measured(node)
    assert found.steps == {
        "WaS": {1: pytest.approx(22.002), 4: pytest.approx(22.008)},
        "TP2": {1: pytest.approx(21.002), 4: pytest.approx(21.008)},
        "DP": {1: pytest.approx(12.002), 4: pytest.approx(12.008)},
    }, "a group has the requests of both GPUs"
    assert ("/admin/memory", 1) in node.asked


def test_a_job_runs_under_each_policy_at_its_level() -> None:
    node = Node()
    found = measured(node, requests=3)
    assert list(found.jobs) == [
        "WaS only",
        "TP2 only",
        "WaS and groups (adaptive)",
        "DP, whole weights",
    ]
    change = node.asked.index(("/admin/memory", 1))
    assert ("/admin/policy", "adaptive") in node.asked[:change]
    assert ("/admin/policy", "adaptive") not in node.asked[change:]


def test_a_node_that_cannot_have_whole_weights_says_why() -> None:
    found = measured(Node(changes=False), requests=2)
    assert "DP" not in found.steps
    assert found.missing == "/admin/memory answered 409: too small"
    assert "DP, whole weights" not in found.jobs
    assert "There is nothing with whole weights: /admin/memory" in sharing.report(found)


# --- the report and the command ---


def test_the_report_has_the_better_of_streaming_and_groups() -> None:
    found = sharing.Sharing(
        is_projected=True,
        model="m",
        device="h200",
        engines=2,
        share=2,
        context=864,
        steps={"DP": {1: 0.01, 512: 0.09}, "WaS": {1: 0.07, 512: 0.09}, "TP2": {1: 0.02, 512: 0.1}},
        jobs={"DP, whole weights": 10.0, "WaS only": 20.0},
        output_tokens=5000,
    )
    lines = sharing.report(found).splitlines()
    assert lines[0] == "# Shared weights by batch size, projected: m, 2 h200"
    assert "| 1 | 10.00 | 70.00 | 20.00 | 20.00 |" in lines
    assert "| 512 | 90.00 | 90.00 | 100.00 | 90.00 |" in lines
    assert "| WaS only | 20.0 | 250 | 0.50 |" in lines


def test_the_command_prints_what_it_projects(capsys: pytest.CaptureFixture[str]) -> None:
    assert sharing.main(["--model-shape", MODEL, "--projected", "h200", "--batches", "8"]) == 0
    assert "| 8 | " in capsys.readouterr().out


def test_the_help_names_no_default_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sharing.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Other options are those of 'shoal serve'. options:" in text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--share-weights", "4"], "--share-weights 4: of 2 engines, 2 to all may share"),
        (["--batches", "0"], "--batches 0: batches have at least one request"),
        (["--projected", "h200", "--eager"], "--eager: --projected starts no node"),
        (["--projected", "h200", "--fp8", "block"], "--fp8: with --projected, the shape says"),
        (["--projected", "no-such"], "no-such"),
        (["--tokens", "0"], "--tokens"),
    ],
)
def test_wrong_options_are_refused(options: list[str], error: str) -> None:
    with pytest.raises(UserError, match=error):
        sharing.main(["--model-shape", MODEL, *options])


def test_experts_are_not_shared() -> None:
    with pytest.raises(UserError, match="has experts, which are not shared"):
        sharing.main(["--model-shape", "qwen3-30b-a3b-bf16", "--projected", "h200"])


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_shapes_in_fp8_say_so_as_checkpoints_do(kind: str) -> None:
    found = in_fp8({"hidden_size": 8}, kind)
    assert found["hidden_size"] == 8
    quantised = found["quantization_config"]
    assert quantised["quant_method"] == ("compressed-tensors" if kind == "channel" else "fp8")
    assert (quantised.get("weight_block_size") == [128, 128]) is (kind == "block")
