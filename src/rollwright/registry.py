"""Plug points: implementations that a configuration names.

Always true: a name is a built-in kind, an entry point of an installed package (group `rollwright.<point>`), or the path
`module:name` of any importable object, looked up in this order. Nothing is imported before it is needed. An unknown name, a
module that cannot be imported, a wrong option and an exception of the user's code each give one line that names the plug
point and the object.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

from rollwright.aio import is_cancellation
from rollwright.errors import ConfigError, RollwrightError

T = TypeVar("T")

Factory = Callable[..., Any]


class Registry(Generic[T]):
    """The implementations of one plug point. `T`: the type of an implementation, a class, a factory or a function."""

    def __init__(
        self, point: str, what: str, kinds: Mapping[str, "T | str"], *, protocol: str, key: str
    ) -> None:
        """`point`: names the entry-point group, `rollwright.<point>`. `what`: the noun for an implementation in error
        messages. `kinds`: the built-in implementations; a string is a path `module:name` that is imported when first needed.
        `protocol`: path of the class that an implementation follows. `key`: the configuration key that names it.
        """
        self.point, self.what, self.protocol, self.key = point, what, protocol, key
        self._kinds = dict(kinds)
        self._registered: set[str] = set()
        self._offered: dict[str, list[EntryPoint]] | None = None

    @property
    def group(self) -> str:
        """The entry-point group in which packages offer implementations."""
        return f"rollwright.{self.point}"

    @property
    def kinds(self) -> Mapping[str, "T | str"]:
        """The built-in and registered implementations, or their paths."""
        return self._kinds

    def names(self) -> list[str]:
        """All plain names: built-in ones first, then those of installed packages."""
        return [*self._kinds, *sorted(set(self.offered()) - set(self._kinds))]

    def is_built_in(self, name: str) -> bool:
        return name in self._kinds

    def knows(self, name: str) -> bool:
        """Whether the name may exist; a path `module:name` is not imported for this."""
        return name in self._kinds or is_path(name) or name in self.offered()

    def register(self, name: str, implementation: "T | str") -> None:
        """Add an implementation for this process; a name that is taken is refused."""
        if ":" in name or not name:
            raise ConfigError(f"{self.what}: a name is without ':' and not empty, got {name!r}")
        if name in self._kinds or name in self.offered():
            raise ConfigError(f"{self.what} {name!r}: the name is taken; choose another")
        self._kinds[name] = implementation
        self._registered.add(name)

    def unregister(self, name: str) -> None:
        """Remove an implementation that was registered in this process, so that a changed one can take its name."""
        if name not in self._registered:
            raise ConfigError(f"{self.what} {name!r}: was not registered in this process")
        self._registered.remove(name)
        del self._kinds[name]

    def refresh(self) -> None:
        """Read the entry points again: a package may have been installed while this process runs."""
        self._offered = None

    def find(self, name: str) -> T:
        """The implementation of this name, imported if needed."""
        if name in self._kinds:
            found = self._kinds[name]
            return cast(T, import_object(found)) if isinstance(found, str) else found
        if name in self.offered():
            return self._load(name)
        if not is_path(name):
            raise ConfigError(f"{self.what}: {self.unknown(name)}")
        with self.blame(name):
            return cast(T, import_object(name))

    def make(self, name: str, *leading: Any, **options: Any) -> Any:
        """Call the implementation, a class or a factory, with options checked against its signature."""
        factory = cast(Factory, self.find(name))
        with self.blame(name):
            if not callable(factory):
                raise ConfigError(f"is a {type(factory).__name__}, which cannot be called")
            return factory(*leading, **checked_options(factory, options, len(leading)))

    def function(self, name: str, **options: Any) -> Callable[..., Any]:
        """A function with its options bound. A class is instantiated with them; its objects must be callable."""
        found = cast(Factory, self.find(name))
        if isinstance(found, type):
            made = self.make(name, **options)
            if not callable(made):
                raise ConfigError(f"{self.what} {name}: its objects cannot be called")
            return cast(Callable[..., Any], made)
        with self.blame(name):
            if not callable(found):
                raise ConfigError(f"is a {type(found).__name__}, not a function")
            return partial(found, **options) if options else found

    def unknown(self, name: str) -> str:
        """The message for an unknown name, with the nearest name and all known ones."""
        if not (known := self.names()):
            return f"unknown `{name}`; expected module:name"
        near = get_close_matches(name, known, n=1)
        hint = f" (did you mean `{near[0]}`?)" if near else ""
        return f"unknown `{name}`{hint}; known: {', '.join(known)}, or module:name"

    @contextmanager
    def blame(self, name: str) -> Iterator[None]:
        """Turn an error inside the block into one line that names the implementation. Errors of built-in implementations pass
        unchanged, except for wrong settings."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.what} {name}: {error}") from error
        except RollwrightError:
            raise
        except BaseException as error:
            if self.is_built_in(name) or is_cancellation(error) or isinstance(error, KeyboardInterrupt):
                raise
            raise RollwrightError(f"{self.what} {name}: raised {type(error).__name__}: {error}") from error

    def offered(self) -> Mapping[str, Sequence[EntryPoint]]:
        """Entry points of installed packages by name; several packages may offer the same name."""
        if self._offered is None:
            self._offered = {}
            for point in entry_points(group=self.group):
                self._offered.setdefault(point.name, []).append(point)
        return self._offered

    def _load(self, name: str) -> T:
        point, *others = self.offered()[name]
        if others:
            offers = ", ".join(each.value for each in (point, *others))
            raise ConfigError(f"{self.what} {name!r} is offered by more than one package: {offers}")
        with self.blame(name):
            return cast(T, point.load())


def is_path(name: str) -> bool:
    """Whether the name has the form `module:name`."""
    module, _, attribute = name.partition(":")
    return bool(module and attribute)


RENAMED_MODULES = {
    "rollwright.orchestra": "rollwright.teams",
    "rollwright.orchestra.practice": "rollwright.teams.toy_envs",
    "rollwright.envs.tool_env": "rollwright.envs.adapters.tool_env",
    "rollwright.envs.gymnasium_env": "rollwright.envs.adapters.gymnasium",
    "rollwright.envs.reasoning": "rollwright.envs.adapters.reasoning_gym",
    "rollwright.envs.frozen_lake": "rollwright.envs.games.frozen_lake",
    "rollwright.envs.sokoban": "rollwright.envs.games.sokoban",
}
"""Modules that configurations and run folders of 0.1.0 may name, and their present names."""


def import_object(path: str) -> Any:
    """The object at `module:name`; a `ConfigError` says what is missing."""
    module, _, name = path.partition(":")
    module = RENAMED_MODULES.get(module, module)
    try:
        return attrgetter(name)(import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its imports is missing
        raise ConfigError(f"cannot be imported: no module named {error.name!r}") from error
    except AttributeError as error:
        raise ConfigError(f"cannot be imported: module {module!r} has no {name!r}") from error
    except SystemExit as error:
        raise ConfigError(f"module {module!r} ends the process when it is imported") from error


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` when one of the known names is near, else nothing."""
    by_lower = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""


def checked_options(factory: Factory, options: Mapping[str, Any], leading: int = 0) -> dict[str, Any]:
    """Convert the options to the types that the factory declares; a `ConfigError` names the first wrong one.

    `leading`: number of positional arguments before the options.
    """
    parameters = parameters_of(factory)[leading:]
    named = {
        each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for key in options:
        if key not in named and not takes_any:
            accepted = ", ".join(named) or "none"
            raise ConfigError(f"unknown setting {key!r}{suggestion(key, named)}; accepted: {accepted}")
    for name, each in named.items():
        if each.default is each.empty and name not in options:
            raise ConfigError(f"needs the setting {name!r}")
    return {
        key: _converted(key, value, named[key].annotation) if key in named else value
        for key, value in options.items()
    }


def parameters_of(factory: Factory) -> Sequence[inspect.Parameter]:
    """The factory's parameters; cached, because environments of one factory are made many times."""
    return _cached_parameters(factory) if isinstance(factory, Hashable) else _read_parameters(factory)


def _read_parameters(factory: Factory) -> Sequence[inspect.Parameter]:
    try:
        signature = inspect.signature(factory, eval_str=True)
    except NameError:  # a type imported only for type checkers; the parameter names still count
        signature = inspect.signature(factory)
    return tuple(signature.parameters.values())


_cached_parameters = lru_cache(maxsize=256)(_read_parameters)


def _converted(key: str, value: Any, declared: Any) -> Any:
    if declared is inspect.Parameter.empty:
        return value
    import msgspec  # imported here, so that importing a registry stays cheap

    try:
        return msgspec.convert(value, declared)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").replace(" - at $", ", at ")
        raise ConfigError(f"{key}: {reason[0].lower()}{reason[1:]} (got {value!r})") from None
    except TypeError:  # a type that only the factory itself can check
        return value
