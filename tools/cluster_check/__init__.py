"""The chart in a cluster: installed, called, scaled, upgraded and killed under load, and removed."""
