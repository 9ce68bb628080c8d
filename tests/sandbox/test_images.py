"""Images of boxes: kept by content, found by name, removed when nobody uses them."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollwright.cli.images import app
from rollwright.errors import ConfigError
from rollwright.sandbox.box import BoxError, BoxLabel, BoxSpec
from rollwright.sandbox.bubblewrap import BubblewrapBackend
from rollwright.sandbox.building import (
    add_folder,
    build_image,
    find_engine,
    folder_digest,
    image_for,
    prune_images,
)
from rollwright.sandbox.images import find_image, images_folder, list_images
from rollwright.sandbox.leases import STATE_VARIABLE


def test_an_equal_folder_has_an_equal_digest_and_any_change_another(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "Dockerfile").write_text("FROM base\n")
        (tmp_path / name / "inner" / "file").write_text("content")
    first = folder_digest(tmp_path / "a")
    assert first == folder_digest(tmp_path / "b")
    assert first != folder_digest(tmp_path / "a", "Other")
    (tmp_path / "b" / "inner" / "file").chmod(0o700)
    assert first != folder_digest(tmp_path / "b")
    (tmp_path / "a" / "inner" / "file").write_text("other")
    assert first != folder_digest(tmp_path / "a")


async def test_a_box_starts_from_an_image_that_was_added(
    bubblewrap: BubblewrapBackend, root_files: Path
) -> None:
    added = await asyncio.to_thread(add_folder, bubblewrap.state, root_files, "small")
    box = await bubblewrap.start(BoxSpec(image="small"), BoxLabel())
    assert (await box.run("echo changed > /etc/passwd; ls /usr/bin/python3")).exit_code != 0
    again = await bubblewrap.start(BoxSpec(image=added.digest), BoxLabel())
    assert (await again.run("cat /etc/passwd")).stdout.startswith("root:")


def test_a_name_belongs_to_the_image_that_got_it_last(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    state = tmp_path / "state"
    first, second = add_folder(state, tmp_path / "one", "n"), add_folder(state, tmp_path / "two", "n")
    found = find_image(state, "n")
    assert found is not None
    assert found.digest == second.digest != first.digest
    assert [each.digest for each in prune_images(state)] == [first.digest]
    assert prune_images(state, used=["n"], keep_named=False) == []
    assert len(prune_images(state, keep_named=False)) == 1
    assert list_images(state) == []


def test_what_an_interrupted_build_has_left_is_pruned(tmp_path: Path) -> None:
    (images_folder(tmp_path) / "draft-x" / "rootfs").mkdir(parents=True)
    assert list_images(tmp_path) == []
    prune_images(tmp_path)
    assert list(images_folder(tmp_path).iterdir()) == []


def test_errors_of_images_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Dockerfile"):
        build_image(tmp_path / "state", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BoxError, match="neither is installed"):
        image_for(tmp_path / "state", "debian", "", "Dockerfile", 5.0)


def test_the_command_lists_adds_and_prunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))
    (tmp_path / "folder").mkdir()
    run = CliRunner()
    assert "no images" in run.invoke(app, ["list"]).output
    assert run.invoke(app, ["add", "mine", str(tmp_path / "folder")]).exit_code == 0
    assert "mine" in run.invoke(app, ["list"]).output
    assert "removed 0 images" in run.invoke(app, ["prune"]).output
    assert "removed 1 images" in run.invoke(app, ["prune", "--all"]).output


@pytest.mark.boxes
async def test_a_dockerfile_is_built_once_and_runs_in_a_box(
    bubblewrap: BubblewrapBackend, root_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        find_engine()
    except BoxError as error:
        pytest.skip(str(error))
    monkeypatch.setenv(STATE_VARIABLE, str(bubblewrap.state))
    await asyncio.to_thread(add_folder, bubblewrap.state, root_files, "localhost/rollwright-test-base")
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(
        "FROM localhost/rollwright-test-base\nENV COLOR=red\nWORKDIR /work\nCOPY file /work/file\nRUN echo built > /made\n"
    )
    (context / "file").write_text("content\n")
    image = await asyncio.to_thread(build_image, bubblewrap.state, context)
    assert (await asyncio.to_thread(build_image, bubblewrap.state, context)).created == image.created
    box = await bubblewrap.start(BoxSpec(image=image.digest), BoxLabel())
    assert (await box.run("echo $COLOR; cat file /made")).stdout == "red\ncontent\nbuilt\n"
