"""The parser of a command's arguments: a wrong one is told on one line."""

import argparse
from typing import NoReturn

from shoal.server.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """A parser that raises ``UserError`` where argparse prints all options and ends the process."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            UserError: always.
        """
        where = f" ('{self.prog} --help' shows all options)" if self.add_help else ""
        raise UserError(" ".join(message.split()) + where)
