"""How long simulated front ends take to stream tokens."""


class FrontEnds:
    """Front ends, each of which streams one token after the other.

    Requests are divided evenly among them. Engines do not wait for front ends, so only clients
    notice when one of them falls behind.

    Args:
        number: how many there are.
        token_seconds: what a token takes a front end.
    """

    def __init__(self, number: int, token_seconds: float) -> None:
        self._token_seconds = token_seconds
        self._busy_until = [0.0] * number

    def sent(self, request: int, tokens: int, now: float, since: float | None = None) -> float:
        """Return when a request's tokens have been sent.

        Args:
            request: its number, by which its front end is chosen.
            tokens: how many tokens came.
            now: when the last of them came.
            since: when its token before these came; these came evenly since then. None: they are
                its first.
        """
        taken, front_end = tokens * self._token_seconds, request % len(self._busy_until)
        begun = now - taken if since is None else since
        done = max(self._busy_until[front_end], begun) + taken
        self._busy_until[front_end] = done
        return max(now, done)
