"""What all services share; it does not import any of them."""
