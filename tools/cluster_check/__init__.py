"""The chart in a cluster: installed, asked, scaled, upgraded and killed under load, and removed."""
