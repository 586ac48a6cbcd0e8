"""Why a connection to a server failed, in words of the operating system."""

import os

import aiohttp


def cause(error: BaseException) -> str:
    """Return the cause on one line: aiohttp's own text repeats the address and names its TLS."""
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(inner, OSError) and inner.errno is not None:
        # asyncio's text has the address; only the resolver's numbers are below 0.
        return os.strerror(inner.errno) if inner.errno > 0 else str(inner.strerror)
    return " ".join(str(inner).split()) or type(inner).__name__
