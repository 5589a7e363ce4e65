"""Versions, switches and configuration files."""

import logging
import sys
from types import ModuleType

import pytest
import torch

from yolo12_fastconv import _compat


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.14.1+cu130", (2, 14, 1)),
        ("2.11.0a0+git1234", (2, 11, 0)),
        ("8.3.242", (8, 3, 242)),
        ("8.4.0rc1", (8, 4, 0)),
        ("unknown", ()),
    ],
)
def test_version_tuple_takes_the_leading_numbers(text, numbers):
    assert _compat.version_tuple(text) == numbers


def test_too_old_torch_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu126")
    with pytest.raises(
        ImportError, match=r"needs torch>=2\.11, found 2\.10\.0\+cu126: pip install 'torch>=2\.11'"
    ):
        _compat.require_torch()


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git1", "2.14.1+cu130", "3.0.0"])
def test_new_enough_torch_is_accepted(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    _compat.require_torch()


def stand_in_ultralytics(version):
    module = ModuleType("ultralytics")
    module.__version__ = version
    return module


@pytest.mark.parametrize("version", ["8.3.241", "8.2.0", "7.0", "unknown"])
def test_too_old_ultralytics_names_both_install_lines(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "ultralytics", stand_in_ultralytics(version))
    with pytest.raises(ImportError) as caught:
        _compat.require_ultralytics()
    text = str(caught.value)
    assert "ultralytics>=8.3.242" in text and f"found {version}" in text
    assert "yolo12-fastconv[ultralytics]" in text and "yolo12-fastconv[headless]" in text


@pytest.mark.parametrize("version", ["8.3.242", "8.4.190", "8.5.0", "9.0.0"])
def test_supported_and_newer_ultralytics_are_accepted(monkeypatch, version):
    module = stand_in_ultralytics(version)
    monkeypatch.setitem(sys.modules, "ultralytics", module)
    assert _compat.require_ultralytics() is module


def test_missing_ultralytics_names_both_install_lines(monkeypatch):
    class Hide:
        def find_spec(self, name, path=None, target=None):
            if name == "ultralytics":
                raise ModuleNotFoundError("No module named 'ultralytics'", name="ultralytics")

    monkeypatch.delitem(sys.modules, "ultralytics", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Hide(), *sys.meta_path])
    with pytest.raises(ImportError, match="none is installed") as caught:
        _compat.require_ultralytics()
    assert "[ultralytics]" in str(caught.value) and "[headless]" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "on"),
    [
        (None, False),
        ("", False),
        ("0", False),
        ("false", False),
        ("OFF", False),
        ("no", False),
        ("1", True),
        ("yes", True),
    ],
)
def test_env_flag(monkeypatch, value, on):
    monkeypatch.delenv("YOLO12_FASTCONV_STRICT", raising=False)
    if value is not None:
        monkeypatch.setenv("YOLO12_FASTCONV_STRICT", value)
    assert _compat.env_flag("YOLO12_FASTCONV_STRICT") is on


def test_logger_is_that_of_ultralytics_once_it_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "ultralytics.utils", raising=False)
    assert _compat.get_logger().name == "yolo12_fastconv"
    utils = ModuleType("ultralytics.utils")
    utils.LOGGER = logging.getLogger("a stand-in for Ultralytics' logger")
    monkeypatch.setitem(sys.modules, "ultralytics.utils", utils)
    assert _compat.get_logger() is utils.LOGGER


def test_config_path_finds_the_tolerances_and_names_what_it_does_not_find():
    assert _compat.config_path("tolerances.yaml").is_file()
    with pytest.raises(FileNotFoundError, match=r"no_such\.yaml"):
        _compat.config_path("no_such.yaml")
