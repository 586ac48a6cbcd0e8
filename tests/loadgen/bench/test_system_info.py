"""What is read out of servers' logs, and what of the environment is recorded."""

from pathlib import Path

import pytest

from shoal.loadgen.bench import system_info

DP0, DP1 = "(EngineCore_DP0 pid=7) INFO 11-20 ", "(EngineCore_DP1 pid=8) INFO 11-20 "
KV = "Maximum concurrency for 32,768 tokens per request: 27.05x"
STOCK = "\n".join(
    [
        DP0 + "[a.py:1] Model loading took 14.99 GiB memory and 2.150000 seconds",
        DP0 + "[a.py:2] torch.compile took 21.50 s in total",
        DP0 + "[a.py:3] Available KV cache memory: 108.20 GiB",
        DP0 + f"[a.py:4] GPU KV cache size: 886,352 tokens, {KV}",
        DP0 + "[a.py:5] Graph capturing finished in 8 secs, took 0.62 GiB",
        DP0 + "[a.py:6] init engine (profile, create kv cache, warmup model) took 41.20 s "
        "(compilation: 21.50 s)",
        DP1 + f"[a.py:4] GPU KV cache size: 886,336 tokens, {KV}",
    ]
)
SHOAL = """\
  engine 0 up after 82.4 s (context 0.50 GiB, communicators 3.1 s 0.61 GiB, tp2 views 0.0 s, \
dp core 40.2 s -0.02 GiB)
  engine 1 up after 83.0 s (communicators 3.1 s, weights 2.0 s)
"""


def test_every_figure_of_a_log_is_read_in_order() -> None:
    found = system_info.read_log(STOCK)
    assert found["kv_tokens"] == [886352.0, 886336.0]
    assert found["model_gib"] == [14.99]
    assert found["model_seconds"] == [2.15]
    assert found["compile_seconds"] == [21.5]
    assert found["available_kv_gib"] == [108.2]
    assert found["graph_gib"] == [0.62]
    assert found["graph_seconds"] == [8.0]
    assert found["init_seconds"] == [41.2]
    assert found["phases"] == {}


def test_what_vllm_chose_is_read_once_each() -> None:
    line = "(Worker pid=7) INFO Using {} all-reduce backends (in dispatch order) for group '{}' out"
    log = "\n".join(
        [
            line.format("['CUSTOM', 'PYNCCL']", "tp:0") + " of potential backends: ['SYMM_MEM'].",
            line.format("['CUSTOM', 'PYNCCL']", "tp:1"),
            line.format("['PYNCCL']", "tp:2"),
            "INFO Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
        ]
    )
    assert system_info.read_log(log)["choices"] == {
        "all-reduce": ["CUSTOM, PYNCCL", "PYNCCL"],
        "attention": ["FLASH_ATTN"],
    }
    assert system_info.read_log(STOCK)["choices"] == {"all-reduce": [], "attention": []}


def test_graphs_are_added_up_over_the_layouts_of_a_process() -> None:
    line = "(shoal engine {} runner pid={}) INFO Graph capturing finished in 8 secs, took {} GiB\n"
    log = line.format(0, 4, 0.5) + line.format(0, 4, 0.75) + line.format(1, 5, 0.5)
    assert system_info.read_log(log)["graph_gib_by_process"] == {"4": 1.25, "5": 0.5}


def test_phases_are_read_by_engine() -> None:
    found = system_info.read_log(SHOAL)["phases"]
    assert found["0"] == {"up": 82.4, "communicators": 3.1, "tp2 views": 0.0, "dp core": 40.2}
    assert found["1"]["weights"] == 2.0
    taken = system_info.read_log(SHOAL)["phases_gib"]
    assert taken["0"] == {"context": 0.5, "communicators": 0.61, "dp core": -0.02}
    assert taken["1"] == {}


DRIVER = """\
#!/bin/sh
case "$1" in
--query-gpu=name) echo "NVIDIA H200"; echo "NVIDIA H200" ;;
--query-gpu=driver_version) echo 580.1; echo 580.1 ;;
--query-gpu=memory.used) echo 512; echo 1024; echo ;;
*) exit 2 ;;
esac
"""
"""Answers as ``nvidia-smi`` does on a machine with two GPUs."""


def test_gpus_are_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(DRIVER)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert system_info.gpu_memory() == [0.5, 1.0]
    found = system_info.environment()
    assert (found["gpus"], found["driver"]) == (["NVIDIA H200"] * 2, "580.1")


@pytest.mark.parametrize("command", [None, "#!/bin/sh\nexit 9\n"])
def test_a_machine_without_gpus_says_so(
    command: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command is not None:
        (tmp_path / "nvidia-smi").write_text(command)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert system_info.gpu_memory() is None
    found = system_info.environment()
    assert (found["gpus"], found["driver"]) == (None, None)


def test_variables_are_recorded_without_credentials() -> None:
    kept = {"SHOAL_SP_EXCHANGE": "peer", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    left = {"VLLM_API_KEY": "s3cret", "SHOAL_ADMIN_KEY": "s3cret", "HOME": "/root"}
    assert system_info.recorded(kept | left) == kept
