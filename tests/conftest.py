"""Shared set-up: a quiet, offline Ultralytics, fixed seeds, small models."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import random
import shutil
import tempfile

# Before Ultralytics is imported, which reads these once.
os.environ.setdefault("YOLO_OFFLINE", "true")
os.environ.setdefault("YOLO_AUTOINSTALL", "false")
os.environ.setdefault("YOLO_VERBOSE", "false")
if "YOLO_CONFIG_DIR" not in os.environ:
    os.environ["YOLO_CONFIG_DIR"] = tempfile.mkdtemp(prefix="ultralytics_")
    atexit.register(shutil.rmtree, os.environ["YOLO_CONFIG_DIR"], ignore_errors=True)
for _name in (
    "YOLO12_FASTCONV",
    "YOLO12_FASTCONV_DISABLE",
    "YOLO12_FASTCONV_STRICT",
    "YOLO12_FASTCONV_CUDA_GRAPH",
):
    os.environ.pop(_name, None)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import support  # noqa: E402
import torch  # noqa: E402
from ultralytics.utils import LOGGER  # noqa: E402


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _yolo12n():
    return support.build("yolo12n.yaml")


@pytest.fixture
def yolo12n(_yolo12n):
    """A stock YOLO12n detection model of one's own, with uneven batch norms, float32, in evaluation mode."""
    return copy.deepcopy(_yolo12n)


@pytest.fixture(scope="session")
def _tiny():
    return support.build(support.TINY)


@pytest.fixture
def tiny(_tiny):
    """A small stock classifier with every kind of YOLO12 block, in evaluation mode; input (N, 3, 32, 32)."""
    return copy.deepcopy(_tiny)


@pytest.fixture
def images():
    """Two random pictures (2, 3, 64, 64) in [0, 1)."""
    return torch.rand(2, 3, 64, 64)


@pytest.fixture
def log(caplog):
    """Messages of Ultralytics' logger, which does not hand them on to the root logger."""
    LOGGER.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=LOGGER.name)
    yield caplog
    LOGGER.removeHandler(caplog.handler)


@pytest.fixture
def cuda():
    """The CUDA device, for tests marked `gpu`; without one, or without the compiled library, they fail.

    TF32 is off during the test: it is allowed by default, stock uses it for some shapes only, and ours for all.
    """
    from yolo12_fastconv import ops

    if not torch.cuda.is_available():
        pytest.fail("tests marked gpu need a CUDA device")
    if not ops.LIBRARY.loaded:
        pytest.fail(f"tests marked gpu need the compiled library: {ops.LIBRARY.reason}")
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield torch.device("cuda", torch.cuda.current_device())
    torch.backends.cudnn.allow_tf32 = before
