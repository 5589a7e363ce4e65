"""The command ``yolo12-fastconv parity``: arguments in Ultralytics' ``key=value`` form, a table, an exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yolo12_fastconv._arguments import Keys, UsageError, parse_pair, positive
from yolo12_fastconv.parity_report import ParityReport

__all__ = ["UsageError", "main", "run"]

HELP = """\
usage: yolo12-fastconv parity model=FILE [KEY=VALUE ...] [--json FILE] [--markdown FILE]

Compares every patched layer, and the whole model, with stock Ultralytics and with a float64 truth.
Exit status: 0 parity, 1 broken (the first bad layer is named), 2 the check could not run.

  model=FILE        a .pt file, or a .yaml file for a model with random weights (yolo12n.yaml)
  source=PATH       a picture or a folder of pictures; default: the bus that ships with Ultralytics
  batch=N           pictures in the batch; default: those of the source, at most 4, and 2 at least for mode=train
  imgsz=N or H,W    input size; default: what the model was trained with
  mode=eval|train   eval: outputs and detections; train: outputs, all gradients, batch norm buffers. Default: eval
  dtype=fp32|fp16|bf16   default: fp32. half=True and quantize=16 mean fp16; a bare bf16 or half is enough
  amp=True          half precision by autocast with float32 weights, as in training; default: only for mode=train
  fuse=True         fold the batch norms first, as predict does; for mode=eval
  tf32=True         allow TF32 in float32 convolutions, on both sides
  device=0|cpu      default: the first GPU, else the CPU
  conf=, iou=       thresholds for the detections; default 0.25 and 0.7
  seed=N            of random weights and gradients; default 0
"""
_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "32": torch.float32,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16, "16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip
_PICTURES = {".bmp", ".dng", ".heic", ".jpeg", ".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (default: this process's arguments). Prints the report; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        print(HELP, end="")
        return 0
    try:
        options = _parse(arguments)
        report = _run(options)
        print(report)
        if options.json:
            _write(options.json, report.to_json())
        if options.markdown:
            _write(options.markdown, report.to_markdown())
    except UsageError as error:
        print(f"yolo12-fastconv parity: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # of Ultralytics, PyTorch or the file system: one line, not a traceback
        text = " ".join(str(error).split()) or "no message"
        print(f"yolo12-fastconv parity: could not run: {type(error).__name__}: {text}", file=sys.stderr)
        return 2
    return 0 if report.ok else 1


def run(arguments: Sequence[str]) -> ParityReport:
    """The report for arguments as the command takes them, without printing or writing it.

    Raises:
        UsageError: an argument that is unknown, out of range, or names what is not there.
    """
    return _run(_parse(list(arguments)))


@dataclass
class _Options:
    model: str = ""
    source: str = ""
    batch: int | None = None
    imgsz: tuple[int, int] | None = None
    mode: str = "eval"
    dtype: torch.dtype | None = None
    amp: bool | None = None
    fuse: bool = False
    tf32: bool = False
    device: str = ""
    conf: float = 0.25
    iou: float = 0.7
    seed: int = 0
    json: str = ""
    markdown: str = ""


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    return values[text.lower()]


def _size(text: str) -> tuple[int, int]:
    values = [positive(part) for part in text.strip("[]() ").split(",")]
    if len(values) > 2:
        raise ValueError
    return values[0], values[-1]


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _mode(text: str) -> str:
    return {"eval": "eval", "val": "eval", "predict": "eval", "train": "train"}[text]


_KEYS: Keys = {
    "model": (str, "a .pt or .yaml file"),
    "source": (str, "a picture or a folder"),
    "batch": (positive, "a positive number"),
    "imgsz": (_size, "a positive number, or height,width"),
    "mode": (_mode, "eval or train"),
    "dtype": (lambda text: _DTYPES[text.lower()], "fp32, fp16 or bf16"),
    "quantize": (lambda text: {"16": torch.float16, "32": torch.float32}[text], "16 or 32"),
    "half": (lambda text: torch.float16 if _boolean(text) else None, "True or False"),
    "bf16": (lambda text: torch.bfloat16 if _boolean(text) else None, "True or False"),
    "amp": (_boolean, "True or False"),
    "fuse": (_boolean, "True or False"),
    "tf32": (_boolean, "True or False"),
    "device": (str, "0, cuda:1 or cpu"),
    "conf": (_fraction, "a number from 0 to 1"),
    "iou": (_fraction, "a number from 0 to 1"),
    "seed": (int, "a number"),
}
_BARE = ("half", "bf16", "amp", "fuse", "tf32")


def _parse(arguments: list[str]) -> _Options:
    options = _Options()
    pending = iter(arguments)
    for argument in pending:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            if name not in ("json", "markdown"):
                raise UsageError(f"unknown option {argument!r}; there are --json FILE and --markdown FILE")
            value = value if equals else next(pending, "")
            if not value:
                raise UsageError(f"--{name} needs a file name")
            setattr(options, name, value)
            continue
        key, converted = parse_pair(argument, _KEYS, _BARE)
        if key in ("dtype", "quantize", "half", "bf16"):
            if converted is None:  # half=False says what is the case anyway
                continue
            if options.dtype not in (None, converted):
                raise UsageError(
                    f"{argument!r} contradicts an earlier argument that asks for {options.dtype}"
                )
            key = "dtype"
        setattr(options, key, converted)
    if not options.model:
        raise UsageError("model=FILE is missing, such as model=yolo12n.pt or model=yolo12n.yaml")
    if options.fuse and options.mode == "train":
        raise UsageError("fuse=True has no meaning for mode=train: a fused model has no batch norms to train")
    for name in ("json", "markdown"):
        folder = Path(getattr(options, name) or ".").absolute().parent
        if not folder.is_dir():
            raise UsageError(f"--{name} {getattr(options, name)}: there is no folder {folder}")
    return options


def _run(options: _Options) -> ParityReport:
    from yolo12_fastconv import parity

    device = _device(options.device)
    yolo, random = _load(options)
    network: nn.Module = yolo.model
    batch, pictures = _pictures(options, yolo)
    if random:
        parity.randomise_(network, batch, seed=options.seed)
    if options.fuse:
        network.eval().fuse(verbose=False)  # type: ignore[operator]
    report = parity.check_parity(
        network, batch, dtype=options.dtype or torch.float32, mode=options.mode, device=device,
        autocast=options.amp, allow_tf32=options.tf32, conf=options.conf, iou=options.iou, seed=options.seed,
    )  # fmt: skip
    weights = f"random weights, seed {options.seed}" if random else "trained weights"
    fused = ", fused" if options.fuse else ""
    report.environment = {"model": f"{options.model} ({weights}{fused})", "source": pictures} | {
        key: value for key, value in report.environment.items() if key != "model"
    }
    return report


def _device(name: str) -> torch.device:
    if not name:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(f"cuda:{name}" if name.isdigit() else name)
    except RuntimeError:
        raise UsageError(f"device={name}: device must be 0, cuda:1 or cpu") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device={name}: torch sees {torch.cuda.device_count()} CUDA GPUs; use device=cpu")
    return device


def _load(options: _Options) -> tuple[Any, bool]:
    """The YOLO object, and whether its weights are random."""
    from ultralytics import YOLO
    from ultralytics.utils.downloads import GITHUB_ASSETS_NAMES

    path = Path(options.model)
    if path.suffix not in (".pt", ".yaml", ".yml"):
        raise UsageError(f"model={options.model}: model must be a .pt or .yaml file")
    if path.suffix == ".pt" and not path.is_file() and path.name not in GITHUB_ASSETS_NAMES:
        raise UsageError(f"model={options.model}: no such file")
    random = path.suffix != ".pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        try:
            yolo = YOLO(options.model)
        except FileNotFoundError:
            raise UsageError(f"model={options.model}: no such file") from None
    if not isinstance(yolo.model, nn.Module):
        raise UsageError(f"model={options.model}: holds no PyTorch layers")
    return yolo, random


def _pictures(options: _Options, yolo: Any) -> tuple[Tensor, str]:
    """The batch as ``predict`` would make it from the source, and in words."""
    from ultralytics.utils import ASSETS

    source = Path(options.source) if options.source else Path(ASSETS) / "bus.jpg"
    if source.is_dir():
        paths = sorted(path for path in source.iterdir() if path.suffix.lower() in _PICTURES)
        if not paths:
            raise UsageError(f"source={source}: no picture in this folder ({', '.join(sorted(_PICTURES))})")
    elif source.is_file():
        paths = [source]
    else:
        raise UsageError(f"source={source}: no such picture or folder")
    count = options.batch or max(min(len(paths), 4), 2 if options.mode == "train" else 1)
    # A source with fewer pictures is gone through again, mirrored every second time.
    chosen = [(paths[i % len(paths)], i // len(paths) % 2 == 1) for i in range(count)]
    images = [_read(path, mirrored) for path, mirrored in chosen]
    batch = _preprocess(images, options.imgsz, yolo)
    names = ", ".join(dict.fromkeys(path.name for path, _ in chosen))
    return batch, f"{names} ({count} in the batch)"


def _read(path: Path, mirrored: bool) -> Any:
    import cv2
    import numpy as np

    image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR) if path.stat().st_size else None
    if image is None:
        raise UsageError(f"source={path}: not a picture that OpenCV can read")
    return np.ascontiguousarray(image[:, ::-1]) if mirrored else image


def _preprocess(images: list[Any], imgsz: tuple[int, int] | None, yolo: Any) -> Tensor:
    """BGR pictures to an RGB batch: letterboxed to multiples of the stride, or for a classifier resized and cropped."""
    import numpy as np
    from ultralytics.data.augment import LetterBox, classify_transforms
    from ultralytics.utils.checks import check_imgsz

    stride = int(max(getattr(yolo.model, "stride", torch.tensor([32]))))
    trained = yolo.overrides.get("imgsz") or (224 if yolo.task == "classify" else 640)
    height, width = check_imgsz(list(imgsz) if imgsz else trained, stride=stride, min_dim=2)
    if yolo.task == "classify":
        from PIL import Image

        transforms = classify_transforms((height, width))
        return torch.stack([transforms(Image.fromarray(image[..., ::-1])) for image in images])
    same = len({image.shape for image in images}) == 1
    letterbox: Any = LetterBox((height, width), auto=same, stride=stride)
    boxed = np.stack([letterbox(image=image) for image in images])[..., ::-1]
    return torch.from_numpy(np.ascontiguousarray(boxed.transpose(0, 3, 1, 2))).float() / 255


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
