"""Ways for rows to leave the service."""
