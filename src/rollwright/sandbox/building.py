"""Images from Dockerfiles and container engines: built by buildah, podman or docker, unpacked once, kept by content.

Always true: two equal build contexts give the same image, which is built once, also by processes that ask at the same time:
the first one holds a lock. An image in the store of this package wins over one of the same name elsewhere.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rollwright.errors import ConfigError
from rollwright.sandbox.box import HOST_IMAGE, BoxError
from rollwright.sandbox.images import DESCRIPTION, ROOT_FILES, Image, find_image, images_folder, read_image
from rollwright.sandbox.leases import remove_folder

_UNPACK_SECONDS = 600.0
_SHOWN = 400


def image_for(state: Path, image: str, build: str, dockerfile: str, seconds: float) -> str:
    """The name or digest in the store for what a task names: an image, or a folder with a Dockerfile."""
    if not build:
        if image == HOST_IMAGE or find_image(state, image) is not None:
            return image
        return import_image(state, image).digest
    return build_image(state, Path(build), dockerfile, seconds=seconds).digest


def build_image(
    state: Path, folder: Path, dockerfile: str = "Dockerfile", *, name: str = "", seconds: float = 600.0
) -> Image:
    """Builds a Dockerfile, or finds the image that an equal folder gave before."""
    file = folder / dockerfile
    if not file.is_file():
        raise ConfigError(f"{file}: does not exist; a Dockerfile is needed to build an image")
    digest = folder_digest(folder, dockerfile)
    with _lock(state, digest):
        found = read_image(images_folder(state) / digest)
        if found is None:
            engine = find_engine()
            reference = f"rollwright/{digest[:24]}"
            _offer_own_images(state, file, engine)
            _run(
                [*_build_command(engine), "-t", reference, "-f", str(file), str(folder)],
                seconds,
                f"building {file}",
            )
            found = _unpack(state, engine, reference, digest, f"{file}")
            _run_quietly([engine, "rmi", "-f", reference])
        return _name(state, found, name)


def import_image(state: Path, reference: str, *, name: str = "") -> Image:
    """Unpacks an image that podman or docker has, or can fetch."""
    engine = find_engine()
    inspected = subprocess.run(
        [engine, "image", "inspect", reference], capture_output=True, env=engine_environment(state)
    )
    if inspected.returncode != 0:
        _run(
            [engine, "pull", reference],
            _UNPACK_SECONDS,
            f"image {reference}: is not in the store, and fetching it",
        )
    content = _run(
        [engine, "image", "inspect", "--format", "{{.Id}}", reference], 60.0, f"image {reference}"
    ).strip()
    digest = hashlib.sha256(content.encode()).hexdigest()
    with _lock(state, digest):
        found = read_image(images_folder(state) / digest) or _unpack(
            state, engine, reference, digest, reference
        )
        return _name(state, found, name or reference)


def add_folder(state: Path, folder: Path, name: str) -> Image:
    """Copies an unpacked root file system into the store under a name."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder")
    digest = hashlib.sha256(f"{name}:{time.time_ns()}".encode()).hexdigest()
    with _draft(state, digest) as draft:
        _run(
            ["cp", "-a", "--reflink=auto", str(folder), str(draft / ROOT_FILES)],
            _UNPACK_SECONDS,
            f"copying {folder}",
        )
        _describe(draft, Image(digest=digest, source=str(folder), created=time.time()))
    found = read_image(images_folder(state) / digest)
    assert found is not None
    return _name(state, found, name)


def prune_images(state: Path, *, used: Sequence[str] = (), keep_named: bool = True) -> list[Image]:
    """Removes images without a name, or all, that no box uses, and what interrupted builds have left."""
    removed = []
    for folder in sorted(images_folder(state).glob("*")):
        if folder.name == HOST_IMAGE or folder.suffix == ".lock":
            continue
        image = read_image(folder)
        if image is not None and (
            (keep_named and image.names) or image.digest in used or set(image.names) & set(used)
        ):
            continue
        remove_folder(folder)
        if image is not None:
            removed.append(image)
    return removed


def find_engine() -> str:
    """The container engine that is used for images."""
    for name in ("podman", "docker"):
        if shutil.which(name):
            return name
    raise BoxError("images are built and unpacked by podman or docker, and neither is installed")


def engine_environment(state: Path) -> dict[str, str]:
    """Environment of a container engine. Without systemd, podman needs other settings than its defaults; those of the user
    win."""
    given = dict(os.environ)
    given.setdefault("BUILDAH_ISOLATION", "chroot")
    if os.path.isdir("/run/systemd/system") or "CONTAINERS_CONF" in given:
        return given
    file = state / "containers.conf"
    if not file.is_file():
        state.mkdir(parents=True, exist_ok=True)
        runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
        limits = 'default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(
            f'[engine]\n{runtime}cgroup_manager = "cgroupfs"\nevents_logger = "none"\n[containers]\n{limits}'
        )
        draft.replace(file)
    given["CONTAINERS_CONF"] = str(file)
    return given


def folder_digest(folder: Path, dockerfile: str = "Dockerfile") -> str:
    """Checksum of all that a build can see: names, modes and contents."""
    total = hashlib.sha256(dockerfile.encode())
    for each in sorted(folder.rglob("*")):
        kind = each.lstat()
        total.update(f"\0{each.relative_to(folder).as_posix()}\0{stat.S_IMODE(kind.st_mode):o}\0".encode())
        if each.is_symlink():
            total.update(os.fsencode(os.readlink(each)))
        elif each.is_file():
            total.update(hashlib.sha256(each.read_bytes()).digest())
    return total.hexdigest()


def _build_command(engine: str) -> list[str]:
    if engine == "podman" and shutil.which("buildah"):
        return ["buildah", "bud", "--isolation", "chroot"]
    return [engine, "build", *(["--isolation", "chroot"] if engine == "podman" else [])]


def _offer_own_images(state: Path, dockerfile: Path, engine: str) -> None:
    """Gives the engine those images of the own store that a Dockerfile begins from and it does not have."""
    for line in dockerfile.read_text(encoding="utf-8", errors="replace").splitlines():
        words = [each for each in line.split() if not each.startswith("--")]
        if len(words) > 1 and words[0].upper() == "FROM" and find_image(state, words[1]) is not None:
            offer_image(state, words[1], engine, as_name=words[1])


def offer_image(state: Path, name: str, engine: str, *, as_name: str = "") -> str:
    """The name under which the engine has an image: its own, or one of the store, which it gets here the first time."""
    image = find_image(state, name)
    if image is None:
        if _run_quietly([engine, "image", "inspect", name]) != 0:
            raise BoxError(f"image {name}: is neither in the store (`rollwright images`) nor in {engine}")
        return name
    reference = as_name or f"localhost/rollwright/{image.digest[:24]}"
    if _run_quietly([engine, "image", "inspect", reference]) == 0:
        return reference
    given = [word for key, value in image.environment.items() for word in ("-c", f"ENV {key}={value}")]
    given += ["-c", f"WORKDIR {image.workdir}"] if image.workdir else []
    given += ["-c", f"USER {image.user}"] if image.user else []
    files = images_folder(state) / image.digest / ROOT_FILES
    packing = subprocess.Popen(["tar", "-C", str(files), "-c", "."], stdout=subprocess.PIPE)
    done = subprocess.run(
        [engine, "import", *given, "-", reference],
        stdin=packing.stdout,
        capture_output=True,
        env=engine_environment(state),
    )
    packing.wait()
    if done.returncode != 0:
        raise BoxError(f"image {name}: {done.stderr.decode(errors='replace').strip()[-_SHOWN:]}")
    return reference


def _unpack(state: Path, engine: str, reference: str, digest: str, source: str) -> Image:
    environment = engine_environment(state)
    config = msgspec.json.decode(_run([engine, "image", "inspect", reference], 60.0, f"image {reference}"))[
        0
    ]["Config"]
    container = _run(
        [engine, "create", "--network", "none", reference, "true"], 120.0, f"image {reference}"
    ).split()[-1]
    try:
        with _draft(state, digest) as draft:
            files = draft / ROOT_FILES
            files.mkdir()
            exporting = subprocess.Popen(
                [engine, "export", container], stdout=subprocess.PIPE, env=environment
            )
            owner = ["--numeric-owner"] if os.geteuid() == 0 else ["--no-same-owner"]
            unpacked = subprocess.run(
                ["tar", "-C", str(files), *owner, "-xp"], stdin=exporting.stdout, capture_output=True
            )
            if exporting.wait() != 0 or unpacked.returncode != 0:
                raise BoxError(
                    f"image {reference}: cannot be unpacked: {unpacked.stderr.decode(errors='replace')[-_SHOWN:]}"
                )
            variables = dict(each.partition("=")[::2] for each in config.get("Env") or ())
            image = Image(
                digest=digest,
                source=source,
                environment=variables,
                workdir=config.get("WorkingDir") or "",
                user=config.get("User") or "",
                entrypoint=tuple(config.get("Entrypoint") or ()),
                command=tuple(config.get("Cmd") or ()),
                created=time.time(),
                size=sum(
                    each.lstat().st_size
                    for each in files.rglob("*")
                    if each.is_file() and not each.is_symlink()
                ),
            )
            _describe(draft, image)
    finally:
        _run_quietly([engine, "rm", "-f", container])
    return image


@contextmanager
def _draft(state: Path, digest: str) -> Iterator[Path]:
    """A folder that becomes the image when the block ends without an error."""
    images_folder(state).mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=images_folder(state)))
    draft.chmod(0o755)
    try:
        yield draft
        draft.rename(images_folder(state) / digest)
    except BaseException:
        remove_folder(draft)
        raise


@contextmanager
def _lock(state: Path, digest: str) -> Iterator[None]:
    images_folder(state).mkdir(parents=True, exist_ok=True)
    with open(images_folder(state) / f"{digest[:24]}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _describe(folder: Path, image: Image) -> None:
    draft = folder / f"{DESCRIPTION}.{os.getpid()}"
    draft.write_bytes(msgspec.json.encode(image))
    draft.replace(folder / DESCRIPTION)


def _name(state: Path, image: Image, name: str) -> Image:
    """Gives an image a name, and takes it from the image that had it."""
    if not name or name in image.names:
        return image
    before = find_image(state, name)
    if before is not None and before.digest != image.digest:
        kept = tuple(each for each in before.names if each != name)
        _describe(images_folder(state) / before.digest, msgspec.structs.replace(before, names=kept))
    named = msgspec.structs.replace(image, names=(*image.names, name))
    _describe(images_folder(state) / image.digest, named)
    return named


def _run(command: Sequence[str], seconds: float, what: str) -> str:
    from rollwright.sandbox.leases import state_folder

    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env=engine_environment(state_folder()),
        )
    except subprocess.TimeoutExpired:
        raise BoxError(f"{what}: took longer than {seconds:g} s") from None
    except OSError as error:
        raise BoxError(f"{what}: {error.strerror}: {command[0]}") from error
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise BoxError(f"{what}: {' '.join(words[-3:])[-_SHOWN:] or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def _run_quietly(command: Sequence[str]) -> int:
    from rollwright.sandbox.leases import state_folder

    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command,
            capture_output=True,
            timeout=120.0,
            stdin=subprocess.DEVNULL,
            env=engine_environment(state_folder()),
        ).returncode
    return 1
