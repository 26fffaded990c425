"""A compose deployment that grows, shrinks and is replaced under load, without an error."""
