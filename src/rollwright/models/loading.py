"""Load a model and its tokenizer from a folder, from the cache by name, or from a model hub by `owner/name`.

Invariant: code that lies beside a model's weights is never run.
"""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollwright.errors import ConfigError, FormatError
from rollwright.hardware import Threads, claim_threads, device_name
from rollwright.models.catalogue import CATALOGUE, is_fetched, model_folder
from rollwright.models.hub import download, is_hub_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHUNK = 1 << 20
"""Bytes read at a time, so that large files are never whole in memory."""

DTYPES = ("float32", "bfloat16", "float16")


def resolve(model: str | Path) -> str:
    """Resolve a folder, a name of the catalogue or an `owner/name` to a folder; the last is downloaded if needed."""
    return find(model) or str(download(str(model)))


def find(model: str | Path) -> str | None:
    """The folder of a model that is on this machine; `None` for an `owner/name`, which may have to be downloaded."""
    if Path(model).is_dir():
        return str(model)
    name = str(model)
    if name in CATALOGUE:
        if not is_fetched(name):
            raise ConfigError(f"model {name}: is not on this machine; run `rollwright model fetch {name}`")
        return str(model_folder(name))
    if isinstance(model, str) and is_hub_name(model):
        return None
    raise unknown_model(name)


def unknown_model(name: str) -> ConfigError:
    """The error for a name that is neither a folder nor a known model, with the nearest names."""
    near = [f"`{each}`" for each in _nearest(name)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ConfigError(
        f"model {name!r}: no such folder ({Path(name).expanduser().absolute()}); {hint}accepted: a folder with a model, "
        f"{', '.join(CATALOGUE)}, or owner/name on a hub"
    )


def _nearest(name: str) -> list[str]:
    """Models with similar names, in the catalogue and in the folder that the name points into."""
    path = Path(name).expanduser()
    beside = path.parent if path.parent.is_dir() else path.parent.parent
    try:
        folders = [each for each in beside.iterdir() if (each / "config.json").is_file()]
    except OSError:
        folders = []
    found = difflib.get_close_matches(path.name, [each.name for each in folders], n=2)
    return [
        *(str(beside / each) for each in found),
        *difflib.get_close_matches(name, [*CATALOGUE, "auto"], n=1),
    ]


def load_model(
    model: str | Path, *, dtype: str = "float32", device: str = "cpu", threads: Threads = "auto"
) -> "PreTrainedModel":
    """Load a model in evaluation mode. `threads` sets torch's threads for the whole process, unless `OMP_NUM_THREADS` or
    `MKL_NUM_THREADS` does; see `rollwright.hardware`."""
    folder = resolve(model)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is unknown; accepted: {', '.join(DTYPES)}")
    set_threads(threads)
    torch, transformers = _libraries()
    target = device_name(device)
    try:
        with quiet_library():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {folder}: cannot be loaded: {_reason(folder, error)}") from error
    found: PreTrainedModel = loaded.to(target).eval()
    return found


def load_tokenizer(model: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model."""
    folder = resolve(model)
    _, transformers = _libraries()
    try:
        found: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {folder}: its tokenizer cannot be loaded: {_reason(folder, error)}"
        ) from error
    return found


def set_threads(threads: Threads = "auto") -> None:
    """Set torch's number of threads in this process; the user's variables win."""
    plan = claim_threads(threads)
    torch, _ = _libraries()
    # Set explicitly, because torch caps the variables at the number of cores.
    torch.set_num_threads(plan.threads)


@contextmanager
def quiet_library() -> Iterator[None]:
    """Silence the progress bars and notices of transformers; the caller shows its own."""
    logging: Any = _libraries()[1].utils.logging
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _libraries() -> tuple[Any, Any]:
    claim_threads()
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"models in this process need {error.name}; install rollwright[train]") from error
    return torch, transformers


def _reason(folder: str, error: Exception) -> str:
    """The error in one line; plainer than the library's for a folder without a model."""
    if not (Path(folder) / "config.json").is_file():
        return "the folder has no config.json, which every model has beside its weights and its tokenizer"
    return str(error).strip().split("\n")[0]


def weights_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, sorted; raise `FormatError` if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FormatError(
            f"{folder}: holds no *.safetensors; accepted: a folder as transformers saves a model"
        )
    return files


def weights_checksum(folder: Path) -> str:
    """SHA-256 of the folder's safetensors files, concatenated in name order; of a single file, its own SHA-256."""
    total = sha256()
    for path in weights_files(folder):
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                total.update(chunk)
    return total.hexdigest()
