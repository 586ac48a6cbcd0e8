"""vLLM's part of the front end's application: its routes, its state and its error handlers."""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response
from vllm.entrypoints.anthropic.api_router import router as messages_router
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.utils.server_utils import lifespan
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator.basic import router as basic_router
from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware
from vllm.entrypoints.serve.tokenize.api_router import attach_router as attach_tokenize_router
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router
from vllm.exceptions import VLLMValidationError
from vllm.logging_utils import UvicornAccessLogFilter
from vllm.v1.engine.async_llm import AsyncLLM

from shoal.server.errors import error_response, invalid_body
from shoal.server.frontend.anthropic_messages import tell_errors
from shoal.server.frontend.app import AppOptions, Backstage, build_app
from shoal.server.frontend.response_streams import tell_failures
from shoal.server.gate.logprob_answers import encode_large_answers

VLLM_ROUTERS = (
    chat_router,
    completion_router,
    responses_router,
    messages_router,
    models_router,
    tokenize_router,
    basic_router,
)

_TASKS = ("generate",)

# vLLM adds the route of the tokenizer's settings to its router only when it is attached like this.
_attached = FastAPI()
_attached.state.args = Namespace(enable_tokenizer_info_endpoint=True)
attach_tokenize_router(_attached)


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a log record is about anything but the refusal of a wrong request."""
    error = record.exc_info[1] if record.exc_info else None
    told = [create_error_response(error)] if isinstance(error, Exception) else record.args or ()
    return not any(isinstance(each, ErrorResponse) and each.error.code < 500 for each in told)


# These loggers tell of refused requests, most with a traceback: any client could fill the log.
for _name in (
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.serving",
):
    logging.getLogger(_name).addFilter(_is_ours)


async def build_vllm_app(
    llm: AsyncLLM, backstage: Backstage, options: AppOptions, args: Namespace
) -> FastAPI:
    """Return Shoal's application, with vLLM's state and exception handlers.

    Args:
        llm: runs the requests of vLLM's routes.
        backstage: what Shoal's routes talk to.
        options: the application's options.
        args: the parsed arguments of ``shoal serve``.
    """
    app = build_app(backstage, options, lifespan)
    if args.enable_request_id_headers:
        app.add_middleware(XRequestIdMiddleware)
    init_exception_handler(app)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ValidationError, _invalid_part)
    await init_app_state(llm, app.state, args, _TASKS)
    _hide_directory(app.state.openai_serving_models, args.model)
    _hide_directories_of_adapters(app.state.openai_serving_models)
    encode_large_answers(app.state)
    messages = app.state.anthropic_serving_messages
    messages.message_stream_converter = tell_errors(messages.message_stream_converter)
    responses = app.state.openai_serving_responses
    responses.responses_stream_generator = tell_failures(responses.responses_stream_generator)
    _leave_out_of_the_access_log(args.disable_access_log_for_endpoints)
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    """Answer a body that is not of the route's type, on one line; vLLM's answer has many.

    vLLM's own validators know the field (``VLLMValidationError``); its check of the content type
    raises a text in place of pydantic's complaints.
    """
    del request
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if not all(isinstance(complaint, dict) for complaint in errors):
        return error_response(400, "the header Content-Type must be application/json")
    causes = (complaint.get("ctx", {}).get("error") for complaint in errors)
    parameter = next((c.parameter for c in causes if isinstance(c, VLLMValidationError)), None)
    return invalid_body([_in_messages(complaint) for complaint in errors], parameter)


async def _invalid_part(request: Request, error: Exception) -> Response:
    """Answer a message with a wrong part, which pydantic checks only once vLLM reads the part."""
    del request
    assert isinstance(error, ValidationError)
    complaints = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
    return invalid_body([_in_messages(complaint) for complaint in complaints], "messages")


def _in_messages(complaint: dict[str, Any]) -> dict[str, Any]:
    """Name the field of a complaint about a part of a message.

    Its place begins with the part's number, but nothing tells in which message the part is.
    """
    steps = complaint["loc"][1:]
    if not steps or isinstance(steps[0], str):
        return complaint
    names = (step for step in steps if isinstance(step, str))
    return {**complaint, "loc": ("body", "messages", *names)}


def log_no_refusals() -> None:
    """Stop logging errors of requests: a node that ends hands each request back with an error."""
    logging.getLogger("vllm.entrypoints.generate.base.serving").setLevel(logging.CRITICAL)


def _hide_directory(models: Any, model: str) -> None:
    """Make ``/v1/models`` give the name of a model in a directory, not the directory."""
    for served in models.base_model_paths if Path(model).exists() else ():
        served.model_path = served.name


def _hide_directories_of_adapters(models: Any) -> None:
    """Do the same for adapters, whose requests name the directory to the engines."""
    show = models.show_available_models

    async def shown() -> Any:
        found = await show()
        for card in found.data:
            if card.root is not None and Path(card.root).exists():
                card.root = card.id
        return found

    models.show_available_models = shown


def _leave_out_of_the_access_log(paths: str | None) -> None:
    """Leave requests for these paths, separated by commas, out of uvicorn's access log."""
    left_out = [path.strip() for path in (paths or "").split(",") if path.strip()]
    if left_out:
        logging.getLogger("uvicorn.access").addFilter(UvicornAccessLogFilter(left_out))
