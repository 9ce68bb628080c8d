"""Agents are installed once on this machine, and mounted read-only into boxes.

Always true: an installation is used only when it is complete, because its description is written last; processes that want
the same one wait for each other; other versions are in another folder. Nothing is installed in a rollout.
"""

import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollwright.cache import cache_folder
from rollwright.errors import ConfigError
from rollwright.rollout.cli_agents.recipe import PROGRAM_FOLDER, CliRecipe, Packages
from rollwright.sandbox.box import BoxMount

_COMPLETE = "installed.json"
_SECONDS = 1800.0
_SHOWN = 300

_OF_LIBC = (
    "libc.",
    "libm.",
    "libdl.",
    "libpthread.",
    "librt.",
    "libutil.",
    "ld-linux",
    "linux-vdso",
    "libresolv.",
)
"""Libraries that belong to an image's own C library and cannot be exchanged."""

_NOT_NEEDED = (
    "test",
    "site-packages",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "config-*",
    "lib2to3",
)
"""Parts of Python's library that programs do not use."""


class Installation(msgspec.Struct, frozen=True):
    """An agent that is installed on this machine."""

    folder: str
    packages: tuple[str, ...]

    @classmethod
    def of(cls, recipe: CliRecipe) -> "Installation":
        """Where a recipe's packages are, or will be."""
        assert recipe.packages is not None
        return cls(str(installation_folder(recipe)), recipe.packages.names)

    @property
    def mount(self) -> BoxMount:
        return BoxMount(self.folder, PROGRAM_FOLDER)

    def program(self, word: str) -> str:
        """The path in a box of a program in the folder; `*` stands for any name."""
        found = sorted(Path(self.folder).glob(word))
        if not found:
            raise ConfigError(f"{self.folder}: has no {word}; remove the folder, and it is installed again")
        return f"{PROGRAM_FOLDER}/{found[0].relative_to(self.folder)}"


def install(recipe: CliRecipe) -> None:
    """Installs what a recipe needs, unless it is there."""
    if is_installed(recipe) or recipe.packages is None:
        return
    folder = installation_folder(recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(recipe):
            return  # by a process that was faster
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        _install_packages(recipe, recipe.packages, folder)
        (folder / _COMPLETE).write_bytes(msgspec.json.encode(Installation.of(recipe)))


def is_installed(recipe: CliRecipe) -> bool:
    return recipe.packages is None or (installation_folder(recipe) / _COMPLETE).is_file()


def installation_folder(recipe: CliRecipe) -> Path:
    packages = recipe.packages
    assert packages is not None
    said = "\n".join([packages.source, packages.runtime, platform.machine(), *packages.names])
    return cache_folder() / "cli_agents" / f"{recipe.name}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"


def _install_packages(recipe: CliRecipe, packages: Packages, folder: Path) -> None:
    where = f"agent cli {recipe.name}"
    if packages.source == "npm":
        if shutil.which("npm") is None:
            raise ConfigError(f"{where}: is installed by npm, which is missing; install Node.js")
        command = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder)]
        _run([*command, *packages.names], where)
    else:
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        _run([*command, "--target", str(folder / "site"), *packages.names], where)
    if packages.runtime == "node":
        _copy_node(folder, where)
    elif packages.runtime == "python":
        _copy_python(folder)


def _copy_node(folder: Path, where: str) -> None:
    node = shutil.which("node")
    if node is None:
        raise ConfigError(f"{where}: runs in Node.js, which is missing; install it")
    target = folder / "node" / "bin"
    target.mkdir(parents=True)
    shutil.copy2(Path(node).resolve(), target / "node")


def _copy_python(folder: Path) -> None:
    """This interpreter with its standard library and the system libraries that its modules need."""
    target = folder / "python"
    (target / "bin").mkdir(parents=True)
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(
        library, target / "lib" / library.name, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_NEEDED)
    )
    program = Path(sys.executable).resolve()
    shutil.copy2(program, target / "bin" / "python3")
    modules = sorted((target / "lib" / library.name / "lib-dynload").glob("*.so"))
    for each in _libraries([program, *modules]):
        shutil.copy2(each, target / "lib" / each.name)


def _libraries(programs: Sequence[Path]) -> list[Path]:
    """Shared libraries that programs load, apart from those of the C library."""
    done = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False)
    words = [line.split() for line in done.stdout.splitlines() if "=> /" in line]
    found = {each[0]: Path(each[2]) for each in words if not each[0].startswith(_OF_LIBC)}
    return [found[name] for name in sorted(found)]


def _run(command: Sequence[str], where: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{where}: was not installed within {_SECONDS:g} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["the installer said nothing"]
        raise ConfigError(f"{where}: cannot be installed: {lines[-1][-_SHOWN:]}")
