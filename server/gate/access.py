"""The options that say who may call which part of the server, and where."""

import argparse
import enum
import ipaddress
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from shoal.server.errors import UserError
from shoal.server.gate.keys import ApiKey, plain_key
from shoal.server.word_options import one_of

ADMIN_HOST = "127.0.0.1"
NO_PORT = "off"
API_KEY = "VLLM_API_KEY"
INSECURE_SERIALIZATION = "VLLM_ALLOW_INSECURE_SERIALIZATION"
RESPONSES_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
CRYPTOGRAPHIC_HASHES = ("sha256", "sha256_cbor")
"""Hash algorithms of vLLM's prefix cache for which nobody can find two prompts of one hash."""


class MetricsAccess(enum.StrEnum):
    """Who may read ``/metrics``."""

    KEY = "key"
    """Holders of API keys; everyone if there are no keys."""
    OPEN = "open"
    """Everyone."""
    OFF = "off"
    """No one: the route does not exist."""


@dataclass(frozen=True)
class Access:
    """What the command line says about who may call."""

    keys: tuple[ApiKey, ...] = ()
    """The keys that are not in a file."""
    key_file: Path | None = None
    admin_key_file: Path | None = None
    metrics: MetricsAccess = MetricsAccess.KEY
    share_prefix_cache: bool = False

    @property
    def needs_key(self) -> bool:
        """Whether the API asks for keys."""
        return bool(self.keys) or self.key_file is not None


def take_access(args: Namespace, environ: MutableMapping[str, str]) -> Access:
    """Return who may call, and forget the text of the keys.

    Args:
        args: the parsed arguments, changed in place.
        environ: the environment, changed in place.

    Raises:
        UserError: a key is empty, a file of keys is not valid, or vLLM has a setting that is safe
            only with a single key.
    """
    texts = args.api_key or [environ.get(API_KEY, "")]
    if args.api_key and not all(texts):
        raise UserError("--api-key: a key is empty")
    args.api_key = None
    environ.pop(API_KEY, None)
    for path in filter(None, (args.api_key_file, args.admin_key_file)):
        from shoal.server.gate.key_ring import read_api_keys  # it imports pydantic

        read_api_keys(path)
    access = Access(
        keys=tuple(plain_key(text) for text in texts if text),
        key_file=args.api_key_file,
        admin_key_file=args.admin_key_file,
        metrics=args.metrics,
        share_prefix_cache=args.share_prefix_cache,
    )
    several = len(access.keys) > 1 or access.key_file is not None
    if several and environ.get(RESPONSES_STORE, "0") != "0":
        raise UserError(f"{RESPONSES_STORE}: any API key could read the stored responses of others")
    if several and args.prefix_caching_hash_algo not in CRYPTOGRAPHIC_HASHES:
        raise UserError(
            f"--prefix-caching-hash-algo {args.prefix_caching_hash_algo}: with several API keys it "
            f"must be {' or '.join(CRYPTOGRAPHIC_HASHES)}, or one could forge the prefix of another"
        )
    return access


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse settings with which messages could carry code in place of data.

    Raises:
        UserError: a variable is set that turns off a protection of vLLM's.
    """
    if environ.get(INSECURE_SERIALIZATION, "0") != "0":
        raise UserError(
            f"{INSECURE_SERIALIZATION}: messages between processes must stay plain data"
        )


def add_access_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of API keys, of the admin API, and of the metrics."""
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="API keys with limits, a JSON list that is read again when it changes; besides those "
        "of --api-key",
    )
    group.add_argument(
        "--admin-host",
        default=ADMIN_HOST,
        metavar="HOST",
        help="address of the admin API; any but this machine's own needs --admin-key-file "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--admin-port",
        type=_admin_port,
        metavar="PORT",
        help=f"port of the admin API, 0 for a free one, '{NO_PORT}' for none (default: the one "
        "after --port; none where API keys are set without --admin-key-file)",
    )
    group.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="keys of the admin API, a file of the same format as --api-key-file's",
    )
    group.add_argument(
        "--metrics",
        type=one_of(MetricsAccess),
        choices=tuple(MetricsAccess),
        default=MetricsAccess.KEY,
        help="who may read /metrics on the API's port: who has an API key, everyone, or no one "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--metrics-port",
        type=_port,
        metavar="PORT",
        help="a port for /metrics alone, on --host, that needs no key; 0 for a free one (default: "
        "none)",
    )
    group.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let requests of different API keys share cached prefixes, which tells them by the "
        "time of an answer what others have asked",
    )


def _admin_port(text: str) -> int | str:
    if text == NO_PORT:
        return NO_PORT
    if not _is_port(text):
        raise argparse.ArgumentTypeError(f"{text!r}: it must be from 0 to 65535, or '{NO_PORT}'")
    return int(text)


def _port(text: str) -> int:
    if not _is_port(text):
        raise argparse.ArgumentTypeError(f"{text!r}: it must be from 0 to 65535")
    return int(text)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= 65535


def admin_address(args: Namespace, *, needs_key: bool) -> tuple[str, int] | None:
    """Return where the admin API listens; None if it does not.

    Args:
        args: the parsed arguments.
        needs_key: whether the public API asks for keys.

    Raises:
        UserError: the admin API would be open to people who must not use it, or has no port.
    """
    if args.admin_port == NO_PORT:
        return None
    if args.admin_key_file is None:
        if not is_loopback(args.admin_host):
            raise UserError(f"--admin-host {args.admin_host}: it needs --admin-key-file")
        if needs_key and args.admin_port is None:
            return None
        if needs_key:
            raise UserError("--admin-port: with API keys, it needs --admin-key-file")
    port = args.admin_port
    if port is None:
        port = args.port + 1 if args.port else 0
    if port > 65535:
        raise UserError(f"--port {args.port}: say where the admin API is with --admin-port")
    return args.admin_host, port


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine itself: ``localhost`` or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
