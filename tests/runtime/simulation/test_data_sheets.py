"""GPUs are found by the driver's names for them, and their rates keep the H200's shares."""

import msgspec
import pytest

from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.simulation.data_sheets import (
    DATA_SHEETS,
    H200,
    all_hardware,
    hardware_named,
    name_of,
    projected,
)
from shoal.runtime.simulation.shape_files import FileError, cost_model, read_hardware, read_shape


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA B200", "b200"),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_has_the_figures_of_its_own_name(device: str, name: str | None) -> None:
    assert name_of(device) == name
    assert name is None or name in all_hardware()


def test_the_h200_by_its_data_sheet_is_the_one_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(DATA_SHEETS, "again", H200)  # type: ignore[misc]
    found, measured = projected("again"), read_hardware("h200")
    for field in measured.__struct_fields__:
        assert getattr(found, field) == pytest.approx(getattr(measured, field), rel=1e-3), field


def test_without_nvlink_a_group_takes_longer_and_an_engine_does_not() -> None:
    sheet = projected("h100")
    pcie = msgspec.structs.replace(
        sheet, **{name: getattr(projected("h100-pcie"), name) for name in
                  ("link_bytes_per_second", "allreduce_seconds", "peer_bytes_per_second")}
    )  # fmt: skip
    shape, batch = read_shape("llama-3-8b-bf16"), Batch(decodes=8, prefill_tokens=2000)
    fast, slow = cost_model(shape, sheet), cost_model(shape, pcie)
    assert slow.step_seconds(DP, batch) == fast.step_seconds(DP, batch)
    assert slow.step_seconds(Layout(tp=2), batch) > 1.5 * fast.step_seconds(Layout(tp=2), batch)


def test_a_gpu_without_fp8_has_no_rate_of_it() -> None:
    with pytest.raises(FileError, match="fp8"):
        cost_model(read_shape("llama-3-70b-fp8"), projected("a10"))


def test_hardware_is_read_by_any_name() -> None:
    assert hardware_named("l40s") == projected("l40s")
    assert hardware_named("h200") == read_hardware("h200")
    with pytest.raises(FileError, match="no-such-gpu"):
        hardware_named("no-such-gpu")


@pytest.mark.parametrize(
    ("name", "requests", "tokens"),
    [
        ("h200", 1024, 8192),
        ("h100", 1024, 8192),
        ("b200", 1024, 16_384),
        ("a100-80gb", 256, 2048),
        ("l40s", 256, 2048),
    ],
)
def test_a_server_s_batch_has_vllm_s_own_limits(name: str, requests: int, tokens: int) -> None:
    assert hardware_named(name).batch_limits == (requests, tokens)
