"""The options of HTTPS: their files are read at once, and not only when all engines are up."""

import ssl
from argparse import Namespace
from pathlib import Path

from shoal.server.errors import UserError
from shoal.server.number_options import flag_of


class _EncryptedError(Exception):
    """A key has a password, for which OpenSSL asks when a front end begins."""


def check_certificate(args: Namespace) -> None:
    """Refuse a certificate that front ends could not use.

    Args:
        args: the parsed arguments. ``ssl_ca_certs`` is among them only if vLLM's parser made them.

    Raises:
        UserError: an option lacks its other one, a file cannot be read, or the key and the
            certificate do not belong together; the message names the option.
    """
    if bool(args.ssl_keyfile) != bool(args.ssl_certfile):
        raise UserError("--ssl-keyfile and --ssl-certfile need each other")
    if not args.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(args, name, None)
        try:
            _ = path and Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{flag_of(name)} {path}: {error.strerror}") from None
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, _no_password)
    except _EncryptedError:
        return
    except ssl.SSLError:
        raise UserError(
            f"--ssl-certfile {args.ssl_certfile}: it is no certificate in PEM format whose key is "
            f"in --ssl-keyfile {args.ssl_keyfile}"
        ) from None


def _no_password() -> str:
    raise _EncryptedError
