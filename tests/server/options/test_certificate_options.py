"""A certificate that front ends could not use is refused before anything starts."""

from argparse import Namespace
from pathlib import Path

import pytest

from shoal.server.errors import UserError
from shoal.server.options.certificate_options import check_certificate
from tests.server.certificates import certificate


def refusal(cert: str | None, key: str | None, **others: str) -> str:
    """Return what is wrong with files of HTTPS."""
    with pytest.raises(UserError) as refused:
        check_certificate(Namespace(ssl_certfile=cert, ssl_keyfile=key, **others))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_certificate_with_its_key_is_accepted(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    check_certificate(Namespace(ssl_certfile=cert, ssl_keyfile=key))
    check_certificate(Namespace(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert))
    check_certificate(Namespace(ssl_certfile=None, ssl_keyfile=None, ssl_ca_certs=None))


def test_one_file_is_of_no_use_without_the_other(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    assert "need each other" in refusal(cert, None)
    assert "need each other" in refusal(None, key)


def test_a_file_that_is_not_there_is_named_with_its_option(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    missing = str(tmp_path / "missing")
    assert refusal(missing, key) == f"--ssl-certfile {missing}: No such file or directory"
    assert refusal(cert, missing) == f"--ssl-keyfile {missing}: No such file or directory"
    found = refusal(cert, key, ssl_ca_certs=missing)
    assert found == f"--ssl-ca-certs {missing}: No such file or directory"


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    _, other = certificate(tmp_path, "other")
    (text := tmp_path / "text").write_text("no certificate")
    for files in ((cert, other), (str(text), key), (cert, str(text))):
        found = refusal(*files)
        assert found.startswith(f"--ssl-certfile {files[0]}: ")
        assert found.endswith(f"--ssl-keyfile {files[1]}")


def test_a_key_with_a_password_is_left_to_who_is_asked_for_it(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, password=b"secret")
    check_certificate(Namespace(ssl_certfile=cert, ssl_keyfile=key))
