"""The memory store's resources: every version of each, by id."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollwright.store.checks import pack_mapping, unpack
from rollwright.store.errors import NotFound, StoreError
from rollwright.store.records import ResourcesUpdate


@dataclass(frozen=True, slots=True)
class _Version:
    number: int
    time: float
    data: bytes


class ResourceVersions:
    def __init__(self) -> None:
        self._versions: dict[str, list[_Version]] = {}
        self._latest: str | None = None

    def __contains__(self, resources_id: str) -> bool:
        return resources_id in self._versions

    def add(self, resources_id: str, resources: Mapping[str, Any], now: float) -> ResourcesUpdate:
        data = pack_mapping(resources, "resources")
        versions = self._versions.get(resources_id)
        if versions is None:
            self._versions[resources_id] = [_Version(1, now, data)]
            self._latest = resources_id
        elif versions[0].data != data:
            raise StoreError(
                f"resources {resources_id} exist already, with other values; update them instead"
            )
        return self._record(resources_id, 1)

    def update(self, resources_id: str, resources: Mapping[str, Any], now: float) -> ResourcesUpdate:
        data = pack_mapping(resources, "resources")
        versions = self._versions.get(resources_id)
        if versions is None:
            raise NotFound(f"no resources {resources_id!r}")
        if versions[-1].data != data:
            versions.append(_Version(len(versions) + 1, now, data))
            self._latest = resources_id
        return self._record(resources_id, len(versions))

    def get(self, resources_id: str, version: int | None) -> ResourcesUpdate | None:
        versions = self._versions.get(resources_id)
        if versions is None:
            return None
        number = len(versions) if version is None else version
        return self._record(resources_id, number) if 1 <= number <= len(versions) else None

    def latest(self) -> ResourcesUpdate | None:
        return None if self._latest is None else self.get(self._latest, None)

    def ids(self) -> list[str]:
        return sorted(self._versions)

    def _record(self, resources_id: str, number: int) -> ResourcesUpdate:
        versions = self._versions[resources_id]
        version = versions[number - 1]
        return ResourcesUpdate(resources_id, number, versions[0].time, version.time, unpack(version.data))
