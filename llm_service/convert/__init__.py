"""From the contract's messages to the service's nouns, under its limits."""
