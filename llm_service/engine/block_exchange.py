"""KV blocks that come from or go to other services: the engine's part. The front reads and writes them in host memory;
the engine tells it where, once nobody else reads or writes there."""

from __future__ import annotations

from collections.abc import Callable

from llm_service.engine.block_manager import BlockManager
from llm_service.engine.messages import AwaitBlocks, BlocksAnswer, BlocksArrived, BlocksRead, FindBlocks, LendBlocks
from llm_service.worker.messages import OffloadBlocks, Pulled


class BlockExchange:
    """`order` is `StepQueue.order`: it has all ranks copy blocks to the host, after all steps planned so far, and then
    calls the function that it was given. `send` answers the front, from any thread."""

    def __init__(
        self,
        blocks: BlockManager,
        order: Callable[[OffloadBlocks, Callable[[Pulled], None]], None],
        send: Callable[[BlocksAnswer], None],
    ) -> None:
        self._blocks = blocks
        self._order = order
        self._send = send
        self._lent: dict[int, list[bytes]] = {}
        self._awaited: dict[int, tuple[list[bytes], list[int]]] = {}

    def take(self, message: FindBlocks | LendBlocks | BlocksRead | AwaitBlocks | BlocksArrived) -> None:
        """Carries out a request of the front."""
        match message:
            case FindBlocks():
                self._find(message)
            case LendBlocks():
                self._lend(message)
            case BlocksRead():
                self._read(message)
            case AwaitBlocks():
                self._await(message)
            case BlocksArrived():
                self._arrived(message)

    def _find(self, message: FindBlocks) -> None:
        """Answers how many of a prompt's blocks are cached."""
        self._send(BlocksAnswer(id=message.id, found=self._blocks.match_blocks(message.identities)))

    def _lend(self, message: LendBlocks) -> None:
        """Keeps blocks in host memory to be read."""
        places = self._blocks.lend(message.identities)
        self._lent.setdefault(message.id, []).extend(message.identities[: len(places)])
        self._answer_behind(BlocksAnswer(id=message.id, places=places))

    def _read(self, message: BlocksRead) -> None:
        """The front has finished reading these blocks."""
        self._blocks.host.give_back(self._lent.pop(message.id, ()))

    def _await(self, message: AwaitBlocks) -> None:
        """Reserves places for arriving blocks."""
        places = self._blocks.host.reserve(len(message.identities))
        self._awaited[message.id] = message.identities[: len(places)], places
        self._answer_behind(BlocksAnswer(id=message.id, places=places))

    def _arrived(self, message: BlocksArrived) -> None:
        """Makes the arrived blocks findable, and frees the other places."""
        identities, places = self._awaited.pop(message.id, ([], []))
        self._blocks.host.commit(identities[: message.count], places)

    def _answer_behind(self, answer: BlocksAnswer) -> None:
        """Answers when the copies to these places have been made, and copies from them that may be under way have
        ended."""
        self._order(OffloadBlocks(self._blocks.host.take_offloads()), lambda _: self._send(answer))
