"""Rows on their way between the services."""
