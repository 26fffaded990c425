"""What a service tells about itself: logs, metrics, traces and the times of stages."""
