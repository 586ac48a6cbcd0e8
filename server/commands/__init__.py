"""The ``shoal`` command and its subcommands."""
