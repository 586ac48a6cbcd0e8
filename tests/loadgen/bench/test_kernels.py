"""Kernels by their names as torch's profiler writes them, and the time that each kind is given."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.loadgen.bench.kernels import Activity, Kind, divided, kind_of, read_trace

NAMES = {
    Kind.ALL_REDUCE: [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_bf16(ncclSymkDevWorkArgs4K)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, int, int)",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 4>(vllm::RankData*, int, int)",
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(unsigned long)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<>()",
        "vllm::all_reduce",
        "gloo:all_reduce",
        "c10d::allreduce_",
    ],
    Kind.ALL_TO_ALL: [
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllToAll_RING_LL(ncclWorkElem)",
        "_give_kernel",
        "_take_kernel",
        "c10d::alltoall_base_",
        "gloo:all_to_all",
    ],
    Kind.ALL_GATHER: [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "c10d::_allgather_base_",
        "gloo:all_gather",
    ],
    Kind.COMMUNICATION: [
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "c10d::broadcast_",
    ],
    Kind.GEMM: [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>>>",
        "void cutlass::device_kernel<vllm::enable_sm90_only<cutlass::gemm::kernel::GemmUniversal>>",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(int)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float>(int)",
        "triton_tem_fused_mm_3",
        "_w8a8_block_scaled_mm",
        "fused_moe_kernel",
        "_vector_kernel",
        "_matrix_kernel",
        "aten::addmm",
        "aten::mm",
        "aten::linear",
        "_C::onednn_mm",
    ],
    Kind.ATTENTION: [
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<>>>",
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(flash::F)",
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>>>>",
        "flash::prepare_varlen_num_blocks_kernel(int, int, int)",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits>(Params)",
        "kernel_unified_attention_2d",
        "reduce_segments",
        "_C::cpu_attention_with_kv_cache",
    ],
    Kind.OTHER: [
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(int)",
        "_C::cpu_attn_reshape_and_cache",
        "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)",
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>()",
        "triton_poi_fused_mul_silu_slice_1",
        "triton_red_fused__to_copy_add_all_reduce_mean_mul_pow_rsqrt_0",
        "triton_poi_fused_unified_attention_with_output_mm_2",
        "vllm::unified_attention_with_output",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<>>(int)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "aten::copy_",
    ],
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind, names in NAMES.items() for name in names]
)
def test_a_kernel_is_told_by_its_name(name: str, kind: Kind) -> None:
    assert kind_of(name) is kind


def times(*activities: tuple[Kind, float, float], begin: float = 0.0, end: float = 10.0) -> Any:
    """Return what is not nothing of a division."""
    found = divided([Activity(*one) for one in activities], begin, end)
    assert sum(found.values()) == pytest.approx(end - begin)
    return {kind: seconds for kind, seconds in found.items() if seconds}


def test_the_host_has_what_no_kernel_has() -> None:
    assert times() == {Kind.HOST: 10.0}
    assert times((Kind.GEMM, 1.0, 3.0), (Kind.ATTENTION, 3.0, 4.0), (Kind.GEMM, 9.0, 9.5)) == {
        Kind.GEMM: 2.5,
        Kind.ATTENTION: 1.0,
        Kind.HOST: 6.5,
    }


def test_communication_behind_a_gemm_is_hidden() -> None:
    found = times((Kind.ALL_REDUCE, 0.0, 6.0), (Kind.GEMM, 2.0, 3.0), (Kind.GEMM, 5.0, 8.0))
    assert found == {Kind.ALL_REDUCE: 4.0, Kind.GEMM: 4.0, Kind.HOST: 2.0}


def test_an_operator_counts_as_what_it_calls() -> None:
    nested = times((Kind.OTHER, 0.0, 10.0), (Kind.ALL_TO_ALL, 1.0, 4.0), (Kind.ATTENTION, 4.0, 9.0))
    assert nested == {Kind.OTHER: 2.0, Kind.ALL_TO_ALL: 3.0, Kind.ATTENTION: 5.0}


def test_two_of_a_kind_at_once_count_once() -> None:
    assert times((Kind.GEMM, 0.0, 6.0), (Kind.GEMM, 4.0, 10.0)) == {Kind.GEMM: 10.0}


def test_what_ran_before_or_after_does_not_count() -> None:
    found = times((Kind.GEMM, 0.0, 5.0), (Kind.ATTENTION, 7.0, 9.0), begin=4.0, end=8.0)
    assert found == {Kind.GEMM: 1.0, Kind.HOST: 2.0, Kind.ATTENTION: 1.0}


# --- traces ---


def event(name: str, category: str, begin: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "args": {}}


def trace(path: Path, *events: dict[str, Any]) -> Path:
    beside = [{"ph": "M", "name": "process_name", "pid": 1, "ts": 0.0}, {"ph": "s", "id": 3}]
    content = {"baseTimeNanoseconds": 5_000_000_000, "traceEvents": [*beside, *events]}
    path.write_text(json.dumps(content))
    return path


def test_of_a_gpu_what_ran_on_it_is_read(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "trace",
        event("nvjet_tst_128", "kernel", 1_000_000.0, 500_000.0),
        event("Memcpy DtoH", "gpu_memcpy", 2_000_000.0, 250_000.0),
        event("nccl:all_reduce", "gpu_user_annotation", 0.0, 9_000_000.0),
        event("cudaLaunchKernel", "cuda_runtime", 0.0, 9_000_000.0),
        event("aten::mm", "cpu_op", 0.0, 9_000_000.0),
    )
    assert read_trace(path) == [
        Activity(Kind.GEMM, 6.0, 6.5),
        Activity(Kind.OTHER, 7.0, 7.25),
    ]


def test_without_a_gpu_it_is_operators(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "trace",
        event("aten::mm", "cpu_op", 0.0, 1_000_000.0),
        event("gloo:all_reduce", "user_annotation", 0.0, 2_000_000.0),
        event("a step", "user_annotation", 0.0, 9_000_000.0),
    )
    assert read_trace(path) == [
        Activity(Kind.GEMM, 5.0, 6.0),
        Activity(Kind.ALL_REDUCE, 5.0, 7.0),
    ]


def test_what_is_no_trace_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("{}")
    with pytest.raises(ValueError, match=str(path)):
        read_trace(path)
