"""Stores that execute calls themselves dispatch each record to its handler through one table per class."""

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from rollwright.store.api import Store
from rollwright.store.call_kinds import Result, StoreCall
from rollwright.store.errors import StoreError

Handler = TypeVar("Handler", bound=Callable[..., Coroutine[Any, Any, Any]])


def handles(kind: type[StoreCall[Any]]) -> Callable[[Handler], Handler]:
    """Marks a method of a `Backend` as the handler of one type of call."""

    def mark(handler: Handler) -> Handler:
        handler.handles = kind  # type: ignore[attr-defined]
        return handler

    return mark


class Backend(Store):
    """A store that executes calls itself: a table has one handler for each type of call. A subclass replaces a handler by
    marking another one for the same type."""

    handlers: ClassVar[dict[type[StoreCall[Any]], Callable[..., Coroutine[Any, Any, Any]]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = [method for method in vars(cls).values() if hasattr(method, "handles")]
        cls.handlers = cls.handlers | {method.handles: method for method in own}

    def execute(self, call: StoreCall[Result]) -> Coroutine[Any, Any, Result]:
        try:
            handler = self.handlers[type(call)]
        except KeyError:
            raise StoreError(f"{call.name}: is no call of a store") from None
        return handler(self, call)
