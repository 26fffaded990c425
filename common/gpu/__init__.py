"""GPU work that both services do alike: memory across processes, graphs, copies."""
