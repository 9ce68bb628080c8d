"""Images of boxes: unpacked root file systems, kept by content and shared by all boxes that use them.

Always true: the files of an image never change, because boxes write into layers of their own. An image is complete when its
description exists; what lies in the store without one is left over from an interrupted build and may be removed.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollwright.errors import ConfigError
from rollwright.sandbox.box import HOST_IMAGE, BoxMount, BoxSpec

DESCRIPTION, ROOT_FILES = "image.json", "rootfs"

_HOST_FOLDERS = (
    "proc",
    "dev",
    "sys",
    "etc",
    "root",
    "home",
    "run",
    "opt",
    "srv",
    "mnt",
    "var/tmp",
    "var/log",
    "var/lib",
    "tmp",
)
_HOST_MOUNTS = (
    "/usr",
    "/etc/alternatives",
    "/etc/ssl",
    "/etc/ca-certificates",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
)
_HOST_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HOST_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/hostname": "box\n",
}


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image and what it says about the commands that run in it."""

    digest: str
    names: tuple[str, ...] = ()
    source: str = ""
    """Where it came from: a Dockerfile, a container image, a folder."""
    environment: Mapping[str, str] = {}
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    """Program that a container of it runs, after `entrypoint`; a service of a task runs it."""
    created: float = 0.0
    size: int = 0
    """Bytes of its files."""


class UnpackedImage(msgspec.Struct, frozen=True):
    """What a box is mounted from."""

    lower: tuple[str, ...]
    image: Image
    mounts: tuple[BoxMount, ...] = ()


def images_folder(state: Path) -> Path:
    return state / "images"


def list_images(state: Path) -> list[Image]:
    """All complete images, by name."""
    try:
        folders = sorted(images_folder(state).iterdir())
    except OSError:
        return []
    found = [image for each in folders if (image := read_image(each)) is not None]
    return sorted(found, key=lambda each: (each.names, each.digest))


def read_image(folder: Path) -> Image | None:
    try:
        return msgspec.json.decode((folder / DESCRIPTION).read_bytes(), type=Image)
    except (OSError, msgspec.MsgspecError):
        return None


def find_image(state: Path, name: str) -> Image | None:
    """The image with this name or digest."""
    return next((each for each in list_images(state) if name in each.names or each.digest == name), None)


def unpacked(state: Path, spec: BoxSpec) -> UnpackedImage:
    """The folders and defaults of the image that a spec names."""
    if spec.folder:
        folder = Path(spec.folder).absolute()
        if not folder.is_dir():
            raise ConfigError(f"box: folder: {folder} is not a folder")
        return UnpackedImage((*spec.layers, str(folder)), Image(digest=f"folder:{folder}"))
    if spec.image == HOST_IMAGE:
        skeleton, mounts = host_image(state)
        return UnpackedImage((*spec.layers, str(skeleton)), Image(digest=HOST_IMAGE), mounts)
    image = find_image(state, spec.image)
    if image is None:
        known = ", ".join([HOST_IMAGE, *(name for each in list_images(state) for name in each.names)])
        raise ConfigError(f"box: image {spec.image!r} is not in the store; known: {known}")
    return UnpackedImage((*spec.layers, str(images_folder(state) / image.digest / ROOT_FILES)), image)


def host_image(state: Path) -> tuple[Path, tuple[BoxMount, ...]]:
    """A root folder without any file of this machine, and the folders of its programs to be mounted in it."""
    folder = images_folder(state) / HOST_IMAGE / ROOT_FILES
    if not folder.is_dir():
        _make_host_image(folder)
    places = [*_HOST_MOUNTS, *(f"/{each}" for each in _HOST_LINKS if not os.path.islink(f"/{each}"))]
    return folder, tuple(BoxMount(each, each) for each in places if os.path.exists(each))


def _make_host_image(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    draft.chmod(0o755)
    for each in _HOST_FOLDERS:
        (draft / each).mkdir(parents=True)
    for each in ("tmp", "var/tmp"):
        (draft / each).chmod(0o1777)
    (draft / "root").chmod(0o700)
    (draft / "home/agent").mkdir()
    if os.geteuid() == 0:
        os.chown(draft / "home/agent", 1000, 1000)
    for link in _HOST_LINKS:
        if os.path.islink(f"/{link}"):
            (draft / link).symlink_to(os.readlink(f"/{link}").lstrip("/"))
    for name, text in _HOST_FILES.items():
        (draft / name).write_text(text)
    try:
        draft.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(draft, ignore_errors=True)
