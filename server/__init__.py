"""The HTTP front end and the command line."""
