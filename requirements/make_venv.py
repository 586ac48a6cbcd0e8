"""Make a virtual environment with pip, with nothing but Python's standard library and no root.

Debian ships ``venv`` without ``ensurepip``. There pip's own wheel is fetched from the package index
(``PIP_INDEX_URL``, or PyPI) and installs itself.

Usage: python3 requirements/make_venv.py DIRECTORY
"""

import hashlib
import importlib.util
import os
import re
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import venv
from pathlib import Path

SUPPORTED = ((3, 11), (3, 12))
PIP_WHEEL = "pip-26.3-py3-none-any.whl"
PIP_SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
TIMEOUT_SECONDS = 60


def main() -> None:
    """Make the environment, or end with one line that says why it cannot be made."""
    if len(sys.argv) != 2:
        sys.exit("usage: python3 requirements/make_venv.py DIRECTORY")
    if sys.version_info[:2] not in SUPPORTED:
        sys.exit(
            f"Shoal needs Python 3.11 or 3.12, and {sys.executable} is {sys.version.split()[0]}: "
            "name another with PYTHON=..."
        )
    directory = Path(sys.argv[1])
    if directory.is_symlink():
        # Making an environment empties its directory: here, one that others may be using.
        sys.exit(f"{directory} is a link: make {directory.resolve()} instead, or remove the link")
    has_ensurepip = importlib.util.find_spec("ensurepip") is not None
    venv.create(directory, with_pip=has_ensurepip, symlinks=True, clear=True)
    if has_ensurepip:
        return
    try:
        install_pip(directory / "bin" / "python")
    except (OSError, LookupError, ValueError) as error:
        sys.exit(f"cannot fetch pip ({error}): install it with `apt-get install python3-venv`")


def install_pip(python: Path) -> None:
    """Install pip for ``python`` from its wheel on the package index.

    Raises:
        OSError: the index cannot be reached.
        LookupError: the index does not have the wheel.
        ValueError: the wheel is not the one that was pinned.
    """
    wheel = fetch(find_wheel())
    if hashlib.sha256(wheel).hexdigest() != PIP_SHA256:
        raise ValueError(f"{PIP_WHEEL} does not match its pinned hash")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PIP_WHEEL
        path.write_bytes(wheel)
        # A wheel is a zip file, and Python runs the package inside it.
        run_pip = [str(python), str(path / "pip"), "install", "--no-index", "--quiet", str(path)]
        subprocess.run(run_pip, check=True)


def find_wheel() -> str:
    """Return the URL of pip's wheel on the package index.

    Raises:
        LookupError: the index does not have it.
    """
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    links: list[str] = re.findall(r'href="([^"]+)"', fetch(index).decode())
    for link in links:
        if urllib.parse.urlsplit(link).path.rpartition("/")[2] == PIP_WHEEL:
            return urllib.parse.urljoin(index, link)
    raise LookupError(f"{index} has no {PIP_WHEEL}")


def fetch(url: str) -> bytes:
    """Return what ``url`` holds.

    A bare system may have no certificates yet. The pinned hash vouches for the only file that is
    used, so the connection then goes on unverified.
    """
    try:
        return _read(url, ssl.create_default_context())
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLCertVerificationError):
            raise
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    return _read(url, unverified)


def _read(url: str, context: ssl.SSLContext) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=context) as response:
        body: bytes = response.read()
    return body


if __name__ == "__main__":
    main()
