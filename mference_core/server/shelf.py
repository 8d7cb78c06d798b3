"""The models a server offers: one is loaded at a time, another when a request names it and nobody uses the first."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from mference_core.errors import MferenceError
from mference_core.server.errors import ApiError
from mference_core.server.served import Served

Loader = Callable[[], Served]
"""Loads a model; blocks, and raises `MferenceError`."""


@define(eq=False)
class Lease:
    """A model that stays loaded until it is given back; that may happen once or more often."""

    served: Served
    _shelf: "Shelf"
    _held: bool = field(default=True, init=False)

    def give_back(self) -> None:
        """Let others have it."""
        if self._held:
            self._held = False
            self._shelf.returned()


@define(kw_only=True, eq=False)
class Shelf:
    """Models by name. Requests are taken in order: one for another model waits for those before it, and holds up those after.

    `loaded` is there from the start; `loaders` has what loads the others in its place, and it again after that. Used from
    one event loop, but for `served`. `aliases` are further names of the first; `say` is told of every change.
    """

    loaded: Served
    aliases: tuple[str, ...] = ()
    loaders: Mapping[str, Loader] = field(factory=dict)
    say: Callable[[str], None] = lambda _: None
    _served: Served | None = field(init=False)
    _gate: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _idle: asyncio.Event = field(factory=asyncio.Event, init=False)
    _users: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._served = self.loaded
        self._idle.set()

    @property
    def served(self) -> Served | None:
        """The model in memory; none after one could not be loaded."""
        return self._served

    @property
    def names(self) -> list[str]:
        """Every name a request may give: the first model and its aliases, then the others."""
        first = [self.loaded.model_id, *self.aliases]
        return [*first, *(name for name in self.loaders if name not in first)]

    def find(self, name: str) -> str:
        """Return the model a name stands for. Raises `ApiError` 404."""
        if name in (self.loaded.model_id, *self.aliases):
            return self.loaded.model_id
        if name not in self.loaders:
            raise ApiError(
                status=404,
                message=f"no model {name[:100]!r} here; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    async def take(self, name: str) -> Lease:
        """Return a model, loaded. Raises `ApiError` 404 for a name nobody has, 503 if it cannot be loaded."""
        wanted = self.find(name)
        async with self._gate:
            if self._served is None or self._served.model_id != wanted:
                await self._idle.wait()
                await self._finished(asyncio.create_task(asyncio.to_thread(self._switch, wanted)))
            assert self._served is not None
            self._users += 1
            self._idle.clear()
            return Lease(self._served, self)

    def returned(self) -> None:
        """Count a lease that ended."""
        self._users -= 1
        if not self._users:
            self._idle.set()

    def close(self) -> None:
        """Let go of the model in memory."""
        if self._served is not None:
            self._served.scheduler.close()

    @staticmethod
    async def _finished(switching: "asyncio.Task[Any]") -> None:
        """Wait for a switch to end even if who asked for it has gone: half a switch is none."""
        try:
            await asyncio.shield(switching)
        except asyncio.CancelledError:
            await asyncio.wait([switching])
            raise

    def _switch(self, wanted: str) -> None:
        leaving, self._served = self._served, None
        if leaving is not None:
            self.say(f"loading {wanted} in place of {leaving.model_id}")
            leaving.scheduler.close()
        try:
            self._served = self.loaders[wanted]()
        except MferenceError as error:
            raise ApiError(
                status=503,
                message=f"model {wanted!r} cannot be loaded here; the server's log says why",
                param="model",
                code="model_not_loaded",
                headers={"x-should-retry": "false"},
            ) from error
