"""The turn journal of one attempt, kept in the store."""

from rollwright.agents import JournalEntry, Superseded
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, NotFound


class StoreJournal:
    def __init__(self, store: Store, rollout_id: str, attempt_id: str) -> None:
        self.recorded: dict[int, JournalEntry] = {}
        self._store = store
        self._held = (rollout_id, attempt_id)

    async def append(self, entry: JournalEntry) -> None:
        try:
            await self._store.append_journal(*self._held, [entry.to_bytes()])
        except (AttemptRefused, NotFound) as error:
            raise Superseded(str(error)) from error

    async def clear(self) -> None:
        """Forgets what was recorded: it is of no use."""
        self.recorded.clear()
        await self._store.clear_journal(*self._held)
