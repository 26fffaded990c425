"""The channels to one replica of a service: some for calls, and one for questions about itself, which never queue
there."""

from __future__ import annotations

import asyncio

from common.rpc.channel import ChannelSecurity, open_channel


class ChannelSet:
    """Long-lived channels to the replica at `address`, whose certificate must have `name`: `count` are for `calls`, and
    `own` is for questions about itself. Raises OSError if the files of a certificate cannot be read."""

    def __init__(self, address: str, name: str, security: ChannelSecurity, count: int = 1) -> None:
        self.calls = [open_channel(address, security, name=name) for _ in range(count)]
        self.own = open_channel(address, security, name=name)

    def connect(self) -> None:
        """Connects the channels for calls."""
        for channel in self.calls:
            channel.get_state(try_to_connect=True)

    async def connected(self) -> None:
        """Waits until every channel for calls is connected. Raises UsageError if they are being closed."""
        for channel in self.calls:
            await channel.channel_ready()

    async def close(self, grace: float | None) -> None:
        """Closes all; calls under way have `grace` seconds to end."""
        await asyncio.gather(*(channel.close(grace) for channel in (self.own, *self.calls)))
