"""What the plugin needs around it: versions of PyTorch and Ultralytics, environment switches, configuration files."""

import logging
import os
import re
import sys
from pathlib import Path
from types import ModuleType

TORCH_MINIMUM = (2, 11)
ULTRALYTICS_MINIMUM = (8, 3, 242)
# Newer versions are allowed: patching looks at the blocks it finds and keeps those it does not know.
ULTRALYTICS_TESTED = "8.3.242 to 8.4.190"
ULTRALYTICS_INSTALL = (
    "pip install 'yolo12-fastconv[ultralytics]' or, for opencv-python-headless, "
    "pip install 'yolo12-fastconv[headless]'"
)


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.14.1+cu130" gives (2, 14, 1), "2.11.0a0+git12" gives (2, 11, 0)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def torch_problem() -> str | None:
    """Why the installed PyTorch can't be used, in one sentence with the remedy, or None."""
    import torch

    if version_tuple(torch.__version__) >= TORCH_MINIMUM:
        return None
    return f"yolo12_fastconv needs torch>=2.11, found {torch.__version__}: pip install 'torch>=2.11'"


def require_torch() -> None:
    """Raises ImportError, naming the version found and the remedy, if PyTorch is older than 2.11."""
    problem = torch_problem()
    if problem:
        raise ImportError(problem)


def require_ultralytics() -> ModuleType:
    """Imports and returns `ultralytics`, from either distribution.

    Raises ImportError, naming what was found and both install lines, if it is missing or older than 8.3.242.
    """
    try:
        import ultralytics
    except ModuleNotFoundError as error:
        if error.name != "ultralytics":
            raise
        raise ImportError(
            f"yolo12_fastconv needs ultralytics>=8.3.242, and none is installed: {ULTRALYTICS_INSTALL}"
        ) from error
    version = getattr(ultralytics, "__version__", "unknown")
    if version_tuple(version) < ULTRALYTICS_MINIMUM:
        raise ImportError(
            f"yolo12_fastconv needs ultralytics>=8.3.242 (tested with {ULTRALYTICS_TESTED}), found {version}: "
            f"{ULTRALYTICS_INSTALL}"
        )
    return ultralytics


def env_flag(name: str) -> bool:
    """Whether an environment switch is on. Unset, empty, "0", "false", "no" and "off" are off."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def get_logger() -> logging.Logger:
    """Ultralytics' logger if Ultralytics is imported already, else one named "yolo12_fastconv".

    Importing Ultralytics for its logger alone would cost seconds, and is impossible where it is not installed.
    """
    utils = sys.modules.get("ultralytics.utils")
    logger = getattr(utils, "LOGGER", None)
    return logger if isinstance(logger, logging.Logger) else logging.getLogger("yolo12_fastconv")


def config_path(name: str) -> Path:
    """The path of a file of configs/: in the checkout that this code runs from, else in the installed package.

    Raises FileNotFoundError, naming both places, if it is in neither.
    """
    package = Path(__file__).resolve().parent
    places = [package.parent / "configs" / name, package / "configs" / name]
    # An installed package has strangers' folders beside it: only a checkout has csrc/ there too.
    if not (package.parent / "csrc").is_dir():
        places.reverse()
    for path in places:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"configuration file {name!r} is neither {places[0]} nor {places[1]}: reinstall yolo12-fastconv"
    )
