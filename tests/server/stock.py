"""What stock ``vllm serve`` makes of a command line, and what ``shoal serve`` makes of it."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

from starlette.datastructures import State
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import (
    make_arg_parser,
    propagate_flash_late_interaction,
    validate_parsed_serve_args,
)
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.config import LayoutConfigs
from shoal.runtime.layout_configs import facts_of
from shoal.server.commands import serve
from shoal.server.options import vllm_options


@dataclass(frozen=True)
class Made:
    """What comes of a command line."""

    args: Namespace
    engine_args: AsyncEngineArgs
    config: Any
    """The ``VllmConfig``."""
    configs: LayoutConfigs | None = None
    """Of ours: what processes are handed."""


def parser() -> FlexibleArgumentParser:
    """Return the parser of ``vllm serve``."""
    return make_arg_parser(FlexibleArgumentParser(exit_on_error=False))


def stock(argv: Sequence[str]) -> Made:
    """Do what ``vllm serve`` does with a command line: ``ServeSubcommand``, ``run_server``."""
    args = parser().parse_args(list(argv))
    validate_parsed_serve_args(args)
    if args.model_tag is not None:
        args.model = args.model_tag
    engine_args = AsyncEngineArgs.from_cli_args(args)
    propagate_flash_late_interaction(args, engine_args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    return Made(args, engine_args, config)


def ours(argv: Sequence[str], layouts: Sequence[Layout] = (DP,)) -> Made:
    """Do what ``shoal serve`` does with a command line."""
    args = serve.read_options(argv).args
    engine_args = vllm_options.engine_args(args)
    config = vllm_options.make_vllm_config(engine_args)
    configs = vllm_options.make_layout_configs(engine_args, config, layouts)
    return Made(args, engine_args, config, configs)


def differing(ours: Any, theirs: Any) -> dict[str, tuple[str, str]]:
    """Return the fields in which two ``VllmConfig`` differ, and what each says there."""
    mine, other = facts_of(ours), facts_of(theirs)
    pairs = {path: (mine.get(path, "-"), other.get(path, "-")) for path in {*mine, *other}}
    return {path: pair for path, pair in sorted(pairs.items()) if pair[0] != pair[1]}


# --- the application ------------------------------------------------------------------------------


class Client:
    """The engine client of an application without engines: it has a configuration."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = Mock(name="input processor")
        self.errored = False


async def app_state(made: Made) -> dict[str, Any]:
    """Return what vLLM's application has in its state, as plain values by path."""
    state = State()
    await init_app_state(Client(made.config), state, made.args, ("generate",))
    kept = {k: v for k, v in state._state.items() if k not in ("args", "vllm_config")}
    return dict(_plain("", kept, 0))


_DEPTH = 6


def _plain(path: str, value: Any, depth: int) -> Any:
    """Yield the plain values of what the serving layer is made of."""
    if isinstance(value, str | int | float | bool | None):
        yield path, value
    elif isinstance(value, type):
        yield path, f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _plain(f"{path}.{name}", part, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for place, part in enumerate(value):
            yield from _plain(f"{path}.{place}", part, depth + 1)
    elif callable(value) or depth > _DEPTH or not _of_the_application(value):
        yield path, type(value).__name__
    else:
        yield from _plain(path, vars(value), depth + 1)


def _of_the_application(value: Any) -> bool:
    """Return whether an object is of what serves requests, and not of a configuration."""
    module = type(value).__module__
    parts = ("vllm.entrypoints", "vllm.renderers.online", "vllm.parser", "vllm.reasoning")
    return module.startswith(parts) and hasattr(value, "__dict__")
