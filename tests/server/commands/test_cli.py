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
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2


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
