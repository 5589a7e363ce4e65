"""python -m yolo12_fastconv.info: works in every state of the installation."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from yolo12_fastconv import _library, info

ROOT = Path(__file__).resolve().parent.parent


def test_facts_are_json_and_text():
    facts = info.collect()
    assert json.loads(json.dumps(facts)) == facts or facts["library"]["tried"]  # tuples become lists
    text = info.to_text(facts)
    assert torch.__version__ in text and facts["yolo12_fastconv"]["version"] in text
    assert (
        facts["library"]["path"] in text if facts["library"]["loaded"] else facts["library"]["reason"] in text
    )


def test_command_with_a_broken_library_and_without_ultralytics(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF broken")
    # In front of the environment's packages, so that `import ultralytics` fails there.
    (tmp_path / "ultralytics.py").write_text("raise ModuleNotFoundError('hidden', name='ultralytics')")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "YOLO12_FASTCONV_LIBRARY": str(broken),
        "YOLO12_FASTCONV_STRICT": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    env.pop("YOLO12_FASTCONV", None)
    done = subprocess.run(
        [sys.executable, "-m", "yolo12_fastconv.info", "--json"],
        env=env,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["library"]["loaded"] is False and facts["library"]["reason"]
    assert facts["gpus"] == []
    assert facts["switches"] == {"YOLO12_FASTCONV_LIBRARY": str(broken), "YOLO12_FASTCONV_STRICT": "1"}


def test_ultralytics_of_both_distributions_is_a_problem(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "8.4.190")
    assert "overwrite each other" in info.collect()["ultralytics"]["problem"]


def test_missing_ultralytics_names_both_install_lines(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    facts = info.collect()["ultralytics"]
    assert facts["version"] is None
    assert "[ultralytics]" in facts["problem"] and "[headless]" in facts["problem"]


def test_gpus_say_whether_the_library_serves_them(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_library, "device_facts", lambda index: ("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(_library, "device_supported", lambda index: (False, "of a reason"))
    facts = info.collect()
    assert facts["gpus"] == [
        {"index": 0, "name": "NVIDIA H200", "capability": "9.0", "supported": False, "reason": "of a reason"}
    ]
    assert "cuda:0:" in info.to_text(facts) and "not supported: of a reason" in info.to_text(facts)


def test_help_and_bad_arguments(capsys):
    with pytest.raises(SystemExit) as stop:
        info.main(["--help"])
    assert stop.value.code == 0
    with pytest.raises(SystemExit) as stop:
        info.main(["--jsno"])
    assert stop.value.code == 2
    assert "--jsno" in capsys.readouterr().err


def test_missing_library_says_where_it_was_looked_for(monkeypatch):
    status = _library.LibraryStatus(
        False, None, "the compiled library is not installed", ("a/lib.so", "b/lib.so")
    )
    monkeypatch.setattr(_library, "load", lambda: status)
    text = info.to_text(info.collect())
    assert "looked for a/lib.so" in text and "looked for b/lib.so" in text and "README.md" in text
