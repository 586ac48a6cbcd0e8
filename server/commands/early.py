"""What ``shoal serve`` can say before the slow import of vLLM: its help, and some refusals.

vLLM's parser has some 200 options that this module does not know. So it reads only options that are
written out in full, and leaves to vLLM's parser every word that may mean something else to that
parser. After the import, everything is checked again with vLLM's parser.
"""

import argparse
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.server.commands.command_parser import CommandParser
from shoal.server.errors import UserError
from shoal.server.gate.access import Access, admin_address, check_environment, take_access
from shoal.server.options.serve_options import (
    add_shoal_options,
    check_model,
    check_shoal_options,
    engines_and_group,
)
from shoal.server.options.shift_options import check_shift

HELP_SECTION = "shoal"
"""``--help=shoal`` shows the same as ``--help``."""
_CONFIG = "--config"
_HELP = "--help"

VLLM_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--config": {"metavar": "FILE", "help": "options in a file of YAML or JSON"},
    "--model": {"metavar": "MODEL", "help": "same as the positional MODEL"},
    "--host": {"help": "where to listen (default: %(default)s)"},
    "--port": {"type": int, "help": "port; 0 takes a free one (default: $PORT or %(default)s)"},
    "--api-key": {"nargs": "+", "metavar": "KEY", "help": "keys that clients need"},
    "--api-server-count": {
        "type": int,
        "metavar": "N",
        "help": "front ends (default: one or two for each engine on GPUs, else 1)",
    },
    "--ssl-keyfile": {"metavar": "FILE", "help": "key of the certificate"},
    "--ssl-certfile": {"metavar": "FILE", "help": "certificate, to serve HTTPS"},
    "--prefix-caching-hash-algo": {"default": "sha256", "help": argparse.SUPPRESS},
}
"""Options of vLLM that are checked before it is imported, as its own parser reads them."""

_EPILOG = (
    "All other options are those of 'vllm serve'. --help=all shows every option, --help=NAME those "
    "with NAME in theirs: both first import vLLM, which takes a while."
)


class Bindings(NamedTuple):
    """The addresses that a node listens on."""

    public: tuple[str, int]
    admin: tuple[str, int] | None
    """The admin API's address; None: there is none."""
    metrics: tuple[str, int] | None
    """The address of the port for metrics alone; None: there is none."""

    def check(self) -> None:
        """Refuse one port for two of them, which the kernel would notice only when both listen.

        Raises:
            UserError: the message names the option.
        """
        taken = {self.public[1]: "the API"}
        for option, name, address in (
            ("--admin-port", "the admin API", self.admin),
            ("--metrics-port", "the metrics", self.metrics),
        ):
            if address is None or address[1] == 0:
                continue
            port = address[1]
            if port in taken:
                raise UserError(f"{option} {port}: this is already the port of {taken[port]}")
            taken[port] = name


def make_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser of Shoal's options and of those of vLLM's that are known here.

    Raises:
        UserError: see ``add_shoal_options``.
    """
    parser = CommandParser(
        prog="shoal serve",
        usage="shoal serve [MODEL] [OPTION ...]",
        description="Serve one model on this machine, and change between DP, TP and SP while it "
        "serves. Without MODEL, it serves the small demo model that comes with Shoal.",
        epilog=_EPILOG,
        allow_abbrev=False,
        add_help=False,
    )
    group = parser.add_argument_group("vLLM", "Some of vLLM's options.")
    for flag, settings in VLLM_OPTIONS.items():
        group.add_argument(flag, **settings)
    add_shoal_options(parser, environ)
    return parser


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether the arguments ask for help of any kind."""
    return any(word in ("-h", _HELP) or word.startswith(f"{_HELP}=") for word in argv)


def shows_help(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Print the help that needs no import if it is asked for, and return whether it was."""
    if not {"-h", _HELP, f"{_HELP}={HELP_SECTION}"}.isdisjoint(word.lower() for word in argv):
        make_parser(environ).print_help()
        return True
    return False


def known_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> Namespace | None:
    """Return the arguments that are known without vLLM; ``model`` is None if it is not known.

    Args:
        argv: the arguments of ``shoal serve``.
        environ: the environment.

    Returns:
        None if the arguments may mean something else to vLLM's parser, which reads a file of
        arguments (``--config``) and completes abbreviated names.

    Raises:
        UserError: a known argument is not valid.
    """
    parser = make_parser(environ)
    words = [_with_dashes(word) for word in argv]
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = parser._option_string_actions
    if _CONFIG in names or asks_for_help(words):
        return None
    if any(option.startswith(name) for name in names - known.keys() for option in known):
        return None
    args, rest = parser.parse_known_args(words)
    # After an unknown option, a word may be that option's value: only the first is surely a model.
    if words and (len(rest) == 1 or rest[:1] == words[:1]) and not rest[0].startswith("-"):
        args.model = rest[0]
    return args


def _with_dashes(word: str) -> str:
    """Return an option with dashes, as it is declared: vLLM's parser takes underscores, too."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def check_early(args: Namespace, environ: Mapping[str, str]) -> Bindings:
    """Refuse what the later checks would surely refuse, and return where the node is to listen.

    Args:
        args: what ``known_arguments`` has returned; unchanged.
        environ: the environment; unchanged.

    Raises:
        UserError: something is refused, with the message that the later check would give.
    """
    check_shoal_options(args)
    check_environment(environ)
    access = take_access(Namespace(**vars(args)), dict(environ))
    if args.model is not None:
        check_model(args.model)
    if args.engines is not None:
        _, max_group = engines_and_group(args, args.engines, demo=False)
        check_shift(args, [args.policy], max_group)
    return bindings_of(args, access)


def bindings_of(args: Namespace, access: Access) -> Bindings:
    """Return where the node is to listen.

    Raises:
        UserError: see ``access.admin_address`` and ``Bindings.check``.
    """
    bindings = Bindings(
        (args.host, args.port),
        admin_address(args, needs_key=access.needs_key),
        None if args.metrics_port is None else (args.host, args.metrics_port),
    )
    bindings.check()
    return bindings
