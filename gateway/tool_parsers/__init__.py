"""Calls as models write them: how each form is read."""
