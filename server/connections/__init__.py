"""Connections of a front end, below the application."""
