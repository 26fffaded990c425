"""gRPC as both services and the gateway use it: servers, channels, deadlines, budgets, errors as statuses."""
