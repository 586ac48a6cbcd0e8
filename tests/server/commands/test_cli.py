import re
import subprocess
import sys

import pytest

from shoal.server.commands import cli
from shoal.server.commands.bench import BENCHMARKS
from shoal.server.errors import UserError


def test_help_names_the_commands_and_imports_no_model_library() -> None:
    code = (
        "import sys\n"
        "from shoal.server.commands.cli import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    print({'vllm', 'torch'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "serve" in done.stdout
    assert set(BENCHMARKS) <= set(re.findall(r"[\w-]+", done.stdout))
    assert done.stderr == "set()\n"


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "argument COMMAND: invalid choice: 'frobnicate'"),
        (["bench", "traffc"], "argument BENCHMARK: invalid choice: 'traffc'"),
        (["replay"], "the following arguments are required: --trace ('shoal replay --help' shows"),
        (["replay", "--trace", "poisson", "--rate", "0"], "argument --rate: 0: a rate must be"),
        (["replay", "--trace", "no.csv"], "cannot read no.csv: No such file or directory\n"),
        (["simulate", "--engines", "3"], "argument --engines: invalid choice: 3"),
        (["report"], "the following arguments are required: FILE"),
        (["openapi", "private"], "argument api: invalid choice: 'private'"),
        (["run-batch"], "the following arguments are required: -i/--input-file"),
        (
            ["run-batch", "-i", "in", "-o", "out", "--url", "ftp://x"],
            "--url ftp://x: it must begin with http:// or https://",
        ),
        (
            ["replay", "--trace", "poisson", "--requests", "1", "--base-url", "http://127.0.0.1:1"],
            "cannot reach http://127.0.0.1:1/v1/models: Connection refused\n",
        ),
    ],
)
def test_a_wrong_command_line_is_told_on_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_users_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Module:
        @staticmethod
        def main(argv: list[str]) -> int:
            raise UserError(f"no {argv[0]} today")

    monkeypatch.setattr(cli.importlib, "import_module", lambda _: Module)
    assert cli.main(["serve", "fish"]) == 2
    assert capsys.readouterr().err == "shoal: no fish today\n"
