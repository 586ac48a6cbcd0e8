"""SwiGLU on grouped rows, through Triton's interpreter, beside vLLM's on rows in its own order."""

import pytest
import torch
import triton
from torch.nn import functional
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from shoal.runtime.engine.kernels import grouped_activation_kernel
from shoal.runtime.engine.weights.rules.fused import regroup_rows

KERNEL = grouped_activation_kernel._silu_and_mul


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_activation_kernel, "_silu_and_mul", InterpretedFunction(KERNEL.fn))


def computed(rows: torch.Tensor, groups: int, *, told: int | None = None) -> torch.Tensor:
    """Return what the kernel makes of rows in vLLM's order once they are grouped."""
    grouped = regroup_rows(rows.t(), groups).t().contiguous()
    output = torch.full((len(rows), rows.shape[1] // 2), float("nan"), dtype=rows.dtype)
    grouped_activation_kernel.silu_and_mul(output, grouped, told or groups)
    return output


def expected(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, dim=1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize(("rows", "features"), [(1, 768), (37, 768), (5, 128), (3, 8192)])
def test_it_is_swiglu_in_stock_order(rows: int, features: int, groups: int) -> None:
    given = torch.randn(rows, 2 * features, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(computed(given, groups), expected(given), rtol=1e-5, atol=1e-6)


def test_a_step_without_rows_launches_nothing() -> None:
    output = torch.empty(0, 768)
    grouped_activation_kernel.silu_and_mul(output, torch.empty(0, 1536), 2)
    assert output.shape == (0, 768)


def test_the_gate_is_rounded_before_it_is_multiplied() -> None:
    """So it is in vLLM's kernel, whose results in 16 bits would differ otherwise."""
    given = torch.randn(64, 512, generator=torch.Generator().manual_seed(3)).half()
    gate, up = given.float().chunk(2, dim=1)
    rounded = functional.silu(gate).half() * up.half()
    at_once = (functional.silu(gate) * up).half()
    found = computed(given, 2)
    # The interpreter's exponential is not PyTorch's: one result in a thousand may be rounded apart.
    assert (found != rounded).float().mean() < 1e-3
    assert (found != at_once).float().mean() > 0.1


def test_another_number_of_groups_gives_another_result() -> None:
    given = torch.randn(4, 512, generator=torch.Generator().manual_seed(4))
    assert not torch.allclose(computed(given, 4, told=2), expected(given), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("size", [96, 384])
def test_it_compiles_for_a_gpu_and_reads_sixteen_bytes_at_once(size: int) -> None:
    """Whatever the number of rows is: this is no part of what the kernel is compiled for."""
    constants = {"groups": 2, "size": size, "tile_rows": 8, "tile_columns": 128, "on_gpu": True}
    names = KERNEL.arg_names
    signature = dict.fromkeys(names, "constexpr") | {
        "output": "*bf16",
        "grouped": "*bf16",
        "rows": "i32",
    }
    source = ASTSource(
        fn=KERNEL,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "div.rn.f32" in compiled.asm["ptx"], "as in vLLM's kernel, and no faster division"
