"""What the repository is worked on with: launchers, generators, and the training of the demo model."""
