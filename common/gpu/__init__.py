"""Work on a GPU that both services do alike: its memory across processes, graphs, copies to and fro."""
