"""The admin API's own HTTP server, beside the main one in the first front end."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from socket import socket

import uvicorn


class _SecondServer(uvicorn.Server):
    """A server that leaves the process's signals to the main one."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


@asynccontextmanager
async def serving(config: uvicorn.Config, listener: socket | None) -> AsyncIterator[None]:
    """Serve on a bound socket for as long as the context lasts; do nothing if there is none.

    Args:
        config: the application, and how it is served.
        listener: the bound socket.
    """
    if listener is None:
        yield
        return
    server = _SecondServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
