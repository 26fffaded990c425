"""The LoRA adapters that requests may name: loaded and unloaded while the service runs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping

from common.errors import Exhausted, InvalidInput, NotFound, Precondition, Unavailable
from common.media.item import Modality
from common.telemetry import log
from llm_service.engine_client.client import EngineClient
from llm_service.request import LoadedAdapter

_log = log.get("adapters")
_LONGEST_NAME = 128


class Adapters:
    """The adapters of the service's model `model`, at most `most` at once; `enabled` if a folder to load them from is
    configured. `of_media` are folders of the checkpoint's own adapters, which have no name, by the modality of the
    prompts that need them; of several modalities the first counts.

    An unloaded adapter is dropped when no request uses it any more, so no adapter changes within an answer.
    """

    def __init__(
        self,
        engine: EngineClient,
        models: tuple[str, ...],
        most: int,
        *,
        enabled: bool,
        of_media: Mapping[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._models = models
        self._most = most
        self._enabled = enabled
        self._named: dict[str, LoadedAdapter] = {}
        self._unloaded: set[LoadedAdapter] = set()
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[LoadedAdapter]] = set()
        self._of_media = dict(of_media or {})
        self._own: dict[str, LoadedAdapter] = {}
        engine.on_adapter_lost = self._lose

    @property
    def all(self) -> list[LoadedAdapter]:
        """The adapters that have a name."""
        return list(self._named.values())

    def find(self, name: str) -> LoadedAdapter | None:
        """The one of a name."""
        return self._named.get(name)

    def name_of(self, number: int) -> str | None:
        """The name of the one with a number, if it has one."""
        return next((adapter.name for adapter in self.all if adapter.number == number), None)

    async def load(self, name: str, path: str) -> LoadedAdapter:
        """Loads an adapter's folder under a name; one load at a time. A caller who leaves does not end it. Raises
        TwinlensError, after which nothing has changed."""
        task = asyncio.create_task(self._load(name, path))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _load(self, name: str, path: str) -> LoadedAdapter:
        async with self._loading:
            self._check(name)
            read = await self._engine.load_adapter(path)
            if read.passing:
                raise Unavailable(f"the adapter cannot be loaded now: {read.error}", reason="ENGINE_UNAVAILABLE")
            if read.error:
                raise InvalidInput(f"the adapter cannot be loaded: {read.error}", reason="BAD_ADAPTER", field="path")
            adapter = self._named[name] = LoadedAdapter(name, read.id, read.digest, read.rank)
            _log.info("an adapter is loaded", adapter=name, rank=read.rank)
            return adapter

    async def load_own(self, path: str) -> None:
        """Has the engine read one of the checkpoint's own, before it serves. Raises TwinlensError."""
        read = await self._engine.load_adapter(path)
        if read.error:
            raise Unavailable(f"the checkpoint's own adapter cannot be loaded: {read.error}", reason="ADAPTER_LOST")
        self._own[path] = LoadedAdapter("", read.id, read.digest, read.rank)
        _log.info("the checkpoint's own adapter is loaded", rank=read.rank)

    def of_media(self, modalities: Collection[Modality]) -> LoadedAdapter | None:
        """The checkpoint's own adapter for a prompt with these items. Raises Unavailable if it is lost."""
        path = next((path for kind, path in self._of_media.items() if kind in modalities), None)
        if path is not None and path not in self._own:
            raise Unavailable("the checkpoint's own adapter is lost", reason="ADAPTER_LOST")
        return None if path is None else self._own[path]

    def _check(self, name: str) -> None:
        if not self._enabled:
            raise Precondition("adapters are not served: there is no --lora-dir", reason="ADAPTERS_OFF")
        if not name or len(name) > _LONGEST_NAME or not name.isprintable() or name in self._models:
            raise InvalidInput("this is not a valid name for an adapter", reason="BAD_NAME", field="name")
        if name in self._named:
            raise Precondition("an adapter of that name is loaded", reason="ADAPTER_EXISTS", field="name")
        if len(self._named) + len(self._unloaded) >= self._most:
            raise Exhausted("too many adapters are loaded", reason="TOO_MANY_ADAPTERS")

    def unload(self, name: str) -> LoadedAdapter:
        """Removes an adapter's name. Raises NotFound if there is none."""
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise NotFound("no adapter of that name is loaded", reason="UNKNOWN_ADAPTER", field="name")
        adapter.unloaded = True
        self._unloaded.add(adapter)
        self._give_up_idle([adapter])
        _log.info("an adapter is unloaded", adapter=name, in_flight=adapter.in_flight)
        return adapter

    def begin(self, adapter: LoadedAdapter) -> None:
        """A request is under way with it."""
        adapter.in_flight += 1

    def end(self, adapter: LoadedAdapter) -> None:
        """That request is over, and the engine has been told so."""
        adapter.in_flight -= 1
        self._give_up_idle([adapter])

    def _give_up_idle(self, adapters: Iterable[LoadedAdapter]) -> None:
        for adapter in adapters:
            if adapter.unloaded and not adapter.in_flight and adapter in self._unloaded:
                self._unloaded.remove(adapter)
                self._engine.drop_adapter(adapter.number)

    def _lose(self, number: int) -> None:
        """A new engine cannot load it: its folder has changed."""
        for adapter in [each for each in self.all if each.number == number]:
            del self._named[adapter.name]
        self._own = {path: each for path, each in self._own.items() if each.number != number}
        self._unloaded = {each for each in self._unloaded if each.number != number}

    def check_idle(self) -> None:
        """Raises AssertionError if an adapter counts a request although all are over."""
        assert not self._unloaded, "an adapter that was unloaded is still kept"
        every = [*self.all, *self._own.values()]
        assert not any(adapter.in_flight for adapter in every), "an adapter is held by nobody"
