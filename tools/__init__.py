"""Tools for work on the repository: launchers, generators, and the training of the demo model."""
