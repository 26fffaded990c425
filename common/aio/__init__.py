"""Tasks, threads and streams of asyncio."""
