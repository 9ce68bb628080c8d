"""`rollwright images`: the images of boxes on this machine."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from rollwright.cli.console import clock_time, console
from rollwright.sandbox.building import add_folder, build_image, import_image, prune_images
from rollwright.sandbox.images import Image, images_folder, list_images
from rollwright.sandbox.leases import list_records, state_folder

app = typer.Typer(help="List, build, import and remove the images of boxes.", no_args_is_help=True)


@app.command("list")
def list_all() -> None:
    """List the images, with their sizes and sources."""
    state = state_folder()
    images = list_images(state)
    if not images:
        console().print(f"no images in {images_folder(state)}; `host` is always there", highlight=False)
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("name", "digest", "size", "age", "source"):
        table.add_column(name, no_wrap=name == "digest")
    for each in images:
        age = clock_time(max(0.0, time.time() - each.created))
        names = ", ".join(each.names) or "–"
        table.add_row(names, each.digest[:12], f"{each.size >> 20} MB", age, each.source)
    console().print(table)


@app.command()
def build(
    folder: Annotated[Path, typer.Argument(help="Folder with the Dockerfile.", show_default=False)],
    name: Annotated[
        str, typer.Option(help="Name to use it by. Default: none, it is found by its content.")
    ] = "",
    dockerfile: Annotated[str, typer.Option(help="File in the folder.")] = "Dockerfile",
) -> None:
    """Build a Dockerfile; an equal folder is not built again."""
    _say(build_image(state_folder(), folder.resolve(), dockerfile, name=name))


@app.command("import")
def import_(
    reference: Annotated[
        str, typer.Argument(help="Name of an image in podman or docker.", show_default=False)
    ],
    name: Annotated[str, typer.Option(help="Name to use it by. Default: the same.")] = "",
) -> None:
    """Unpack an image of podman or docker."""
    _say(import_image(state_folder(), reference, name=name))


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name to use it by.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="Unpacked root file system.", show_default=False)],
) -> None:
    """Copy an unpacked root file system."""
    _say(add_folder(state_folder(), folder.resolve(), name))


@app.command()
def prune(
    everything: Annotated[bool, typer.Option("--all", help="Images with a name, too.")] = False,
) -> None:
    """Remove images that have no name and that no box uses."""
    state = state_folder()
    used = [each.image for each in list_records(state)]
    removed = prune_images(state, used=used, keep_named=not everything)
    size = sum(each.size for each in removed)
    console().print(f"removed {len(removed)} images, {size >> 20} MB", highlight=False)


def _say(image: Image) -> None:
    console().print(
        f"{', '.join(image.names) or '–'}  {image.digest[:12]}  {image.size >> 20} MB", highlight=False
    )
