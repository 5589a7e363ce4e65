"""How Ultralytics trains a patched model, and the process-wide patch behind the command line.

`YOLO.train()` builds a new model and reloads the best checkpoint at its end, so a patch on `YOLO.model` would be lost
twice. Three pieces keep it:

- `FastConvTrainerMixin` patches in `setup_model`: after weights are loaded and before compilation, AMP, DDP, optimizer
  and EMA, in every rank. One trainer class per task has it.
- `FastModelMixin` is mixed into the class of a patched `YOLO` object: its `train()` takes such a trainer and patches
  the reloaded model.
- `install` does both for every model of the process, and patches what predictors and validators load.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from torch import nn

from yolo12_fastconv import _autopatch, _compat, _config, graphs
from yolo12_fastconv._graph_capture import unfilled_memory
from yolo12_fastconv.blocks import FAST, STOCK
from yolo12_fastconv.patching import PatchError, _unwrap, patch_model, patch_modules

_compat.require_ultralytics()

# From the modules that define them: `install` runs while the packages above those are half imported.
from ultralytics.engine.model import Model  # noqa: E402
from ultralytics.engine.trainer import BaseTrainer  # noqa: E402
from ultralytics.models.yolo.classify.train import ClassificationTrainer  # noqa: E402
from ultralytics.models.yolo.detect.train import DetectionTrainer  # noqa: E402
from ultralytics.models.yolo.model import YOLO  # noqa: E402
from ultralytics.models.yolo.obb.train import OBBTrainer  # noqa: E402
from ultralytics.models.yolo.pose.train import PoseTrainer  # noqa: E402
from ultralytics.models.yolo.segment.train import SegmentationTrainer  # noqa: E402
from ultralytics.nn.autobackend import AutoBackend  # noqa: E402

__all__ = [
    "FastClassificationTrainer",
    "FastConvTrainerMixin",
    "FastDetectionTrainer",
    "FastOBBTrainer",
    "FastPoseTrainer",
    "FastSegmentationTrainer",
    "FastYOLO",
    "adopt",
    "fast_trainer",
    "install",
    "release",
    "uninstall",
]


# ------------------------------------------------------------------------------------------------------------ trainers


class FastConvTrainerMixin:
    """Mixin for trainers: patches the model that is going to be trained.

    Put it in front of a trainer class, or let `fast_trainer` do so::

        class MyTrainer(FastConvTrainerMixin, DetectionTrainer): ...
    """

    fastconv_options: ClassVar[dict[str, Any]] = {}
    """Keyword arguments for `patching.patch_modules`."""

    def setup_model(self) -> Any:
        """Set up the model as the trainer does, patch it, and log how many of its blocks are patched."""
        checkpoint = super().setup_model()  # type: ignore[misc]
        patch_for_training(self.model, self.fastconv_options)  # type: ignore[attr-defined]
        return checkpoint

    def train(self) -> Any:
        """Train as the trainer does, with `unfilled_memory`.

        Raises:
            RuntimeError: the ranks of a multi-GPU run could not be given this class (old Ultralytics only).
        """
        if getattr(self, "ddp", False):
            _check_ranks_can_import(type(self))
        with contextlib.nullcontext() if _config.disabled() else unfilled_memory():
            return super().train()  # type: ignore[misc]

    def validate(self) -> Any:
        """Validate as the trainer does, and free the CUDA graphs that the EMA has made for it.

        Before it, the training graph is freed if the device has less room beside it than it takes: without graphs a
        step's activations would be free by now.
        """
        network = getattr(self, "model", None)
        if isinstance(network, nn.Module):
            graphs.make_room(_unwrap(network))
        try:
            return super().validate()  # type: ignore[misc]
        finally:
            network = getattr(getattr(self, "ema", None), "ema", None)
            if isinstance(network, nn.Module):
                graphs.free(network)

    def _clear_memory(self, *threshold: Any, **named: Any) -> None:
        """Clear memory as the trainer does; where it has run out (without a threshold), free the CUDA graphs first."""
        network = getattr(self, "model", None)
        if not threshold and not named and isinstance(network, nn.Module):
            graphs.free(_unwrap(network))
        super()._clear_memory(*threshold, **named)  # type: ignore[misc]


class FastDetectionTrainer(FastConvTrainerMixin, DetectionTrainer):
    """`DetectionTrainer` that trains a patched model."""


class FastSegmentationTrainer(FastConvTrainerMixin, SegmentationTrainer):
    """`SegmentationTrainer` that trains a patched model."""


class FastPoseTrainer(FastConvTrainerMixin, PoseTrainer):
    """`PoseTrainer` that trains a patched model."""


class FastOBBTrainer(FastConvTrainerMixin, OBBTrainer):
    """`OBBTrainer` that trains a patched model."""


class FastClassificationTrainer(FastConvTrainerMixin, ClassificationTrainer):
    """`ClassificationTrainer` that trains a patched model."""


_FAST_TRAINERS: dict[type, type] = {
    DetectionTrainer: FastDetectionTrainer,
    SegmentationTrainer: FastSegmentationTrainer,
    PoseTrainer: FastPoseTrainer,
    OBBTrainer: FastOBBTrainer,
    ClassificationTrainer: FastClassificationTrainer,
}


def fast_trainer(trainer: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The counterpart of `trainer` that trains a patched model.

    Args:
        trainer: a trainer class, or any callable that returns a trainer, as ``YOLO.train(trainer=...)`` takes it.
        **options: keyword arguments for `patching.patch_modules`; None, False, ``attention=True`` and
            ``memory="auto"`` are defaults.

    Returns:
        For a class a subclass of it, or the class itself if it patches already; importable by name for the five tasks'
        own trainers without options. For another callable, a callable.

    Raises:
        TypeError: `trainer` cannot be called.
    """
    options = _without_defaults(options)
    if not isinstance(trainer, type):
        if not callable(trainer):
            raise TypeError(f"trainer must be a trainer class, got {trainer!r}")
        return functools.partial(_make_fast_trainer, trainer, options)
    fast: Any
    if issubclass(trainer, FastConvTrainerMixin):
        fast = trainer
    elif trainer in _FAST_TRAINERS:
        fast = _FAST_TRAINERS[trainer]
    else:
        # "Trainer" in the name is how Ultralytics decides to attach its logging integrations.
        fast = type(f"FastConv{trainer.__name__}", (FastConvTrainerMixin, trainer), {"__module__": __name__})
    if options and options != fast.fastconv_options:
        fast = type(fast.__name__, (fast,), {"__module__": __name__, "fastconv_options": options})
    return fast


def _without_defaults(options: dict[str, Any]) -> dict[str, Any]:
    usual = {"attention": True, "memory": "auto"}  # of the others None or False
    return {
        name: value
        for name, value in options.items()
        if value is not None and value != usual.get(name, False)
    }


def _make_fast_trainer(
    factory: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    trainer = factory(*args, **kwargs)
    trainer.__class__ = fast_trainer(type(trainer), **options)
    return trainer


def patch_for_training(model: nn.Module, options: dict[str, Any]) -> None:
    """Patch a trainer's model, idempotently, and log the count. Without effect if the plugin is disabled."""
    if _config.disabled():
        return
    if _in_force() and _config.cuda_graph() and graphs.why_not(_unwrap(model)) is None:
        options = {**options, "cuda_graph": True}
    patch_modules(model, **options)
    fast, eligible = count_blocks(model)
    _compat.get_logger().info(
        f"yolo12_fastconv: training with {fast} of {eligible} Conv blocks patched (the EMA is a copy of this model)"
    )


def count_blocks(model: nn.Module) -> tuple[int, int]:
    """How many blocks of `model` are patched, and how many are patched or of a class that could be."""
    fast = sum(type(module) in STOCK for module in model.modules())
    return fast, fast + sum(type(module) in FAST for module in model.modules())


def _check_ranks_can_import(trainer: type) -> None:
    from ultralytics.utils import dist

    # Newer releases pickle the class by value; older ones write `from module import name` into the ranks' script.
    if "cloudpickle" in inspect.getsource(dist.generate_ddp_file):
        return
    if (
        getattr(inspect.getmodule(trainer), trainer.__name__, None) is not trainer
        or trainer.__module__ == "__main__"
    ):
        raise RuntimeError(
            f"this Ultralytics cannot hand {trainer.__name__} to the processes of a multi-GPU run: update Ultralytics, "
            "or patch without include, exclude and strict and train without trainer=..."
        )


# ------------------------------------------------------------------------------------------------------ YOLO objects


class FastModelMixin:
    """Mixin for Ultralytics' `Model` classes: what a patched `YOLO` object becomes."""

    _stock: type
    _fastconv_options: dict[str, Any]

    def train(self, trainer: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Train as `Model.train` does, patched; `YOLO.model` is patched afterwards, whatever happens."""
        if _config.disabled():
            return super().train(trainer=trainer, **kwargs)  # type: ignore[misc]
        # Named explicitly, the trainer also serves every data set of `data=[...]`, in this process.
        trainer = trainer or self._smart_load("trainer")  # type: ignore[attr-defined]
        try:
            return super().train(trainer=fast_trainer(trainer, **self._fastconv_options), **kwargs)  # type: ignore[misc]
        finally:
            self._patch_again()

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights as `Model.load` does, which may take over stock blocks of the head; then patch those."""
        try:
            return super().load(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._patch_again()

    def tune(self, *args: Any, **kwargs: Any) -> Any:
        """Tune as `Model.tune` does; its training runs are new processes, which are asked to patch by environment."""
        with _patched_children(self._fastconv_options):
            return super().tune(*args, **kwargs)  # type: ignore[misc]

    def _patch_again(self) -> None:
        model = vars(self)["_modules"].get("model")
        if isinstance(model, nn.Module) and not _config.disabled():
            patch_modules(model, **self._fastconv_options)

    # Pickled blocks are stock ones: an object that arrives in another process is patched anew there.
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_fast_model, (self._stock,), vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._patch_again()


class FastYOLO(FastModelMixin, YOLO):  # type: ignore[misc]  # `Model.train` is no `nn.Module.train` either
    """The class of a patched `YOLO` object."""

    _stock = YOLO


@functools.cache
def _fast_model(stock: Any) -> Any:
    if stock is YOLO:
        return FastYOLO
    return type(f"Fast{stock.__name__}", (FastModelMixin, stock), {"_stock": stock, "__module__": __name__})


def _new_fast_model(stock: type) -> Any:
    fast = _fast_model(stock)
    return fast.__new__(fast)


def adopt(yolo: Any, **options: Any) -> None:
    """Make a `YOLO` (`RTDETR`, ...) object train patched from now on. Its `model` is left as it is.

    Args:
        yolo: any instance of Ultralytics' `Model`; one adopted before only takes over the new options.
        **options: keyword arguments for `patching.patch_modules`, used for every model that training makes.
    """
    if not isinstance(yolo, FastModelMixin):
        stock: Any = type(yolo)
        yolo.__class__ = _fast_model(stock)
    yolo._fastconv_options = _without_defaults(options)
    yolo.predictor = None  # it owns a copy of the model from before


def release(yolo: Any) -> None:
    """Undo `adopt`. Its `model` is left as it is."""
    if isinstance(yolo, FastModelMixin):
        del yolo._fastconv_options
        yolo.__class__ = yolo._stock
    yolo.predictor = None


@contextlib.contextmanager
def _patched_children(options: dict[str, Any]) -> Iterator[None]:
    logger = _compat.get_logger()
    wanted = {_autopatch.ENABLE: "1"}
    if options.get("cuda_graph"):
        wanted[_config.CUDA_GRAPH] = "1"
    if any(name != "cuda_graph" for name in options):
        logger.warning(
            "yolo12_fastconv: tune() runs stock training processes: they cannot be told what to leave out"
        )
        yield
        return
    if not _config.disabled() and not _autopatch.installed():
        logger.warning(
            f"yolo12_fastconv: tune() runs stock training processes: {_autopatch.PTH} is not in site-packages, "
            "install the package with pip"
        )
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


# --------------------------------------------------------------------------------------------------- the whole process


class _Wrapped(NamedTuple):
    """A method of an Ultralytics class, replaced."""

    owner: type
    name: str
    original: Any
    replacement: Any


_wrapped: list[_Wrapped] = []
_lock = threading.Lock()
_active = False


def _smart_load(original: Callable[..., Any]) -> Callable[..., Any]:
    # With our class as the trainer, the ranks of a multi-GPU run import the plugin.
    def smart_load(self: Any, key: str) -> Any:
        found = original(self, key)
        return fast_trainer(found) if key == "trainer" and _in_force() else found

    return smart_load


def _setup_model(original: Callable[..., Any]) -> Callable[..., Any]:
    # Trainers that no `YOLO` object chose: `trainer=...`, and those used by themselves.
    def setup_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = original(self, *args, **kwargs)
        if _in_force() and not isinstance(self, FastConvTrainerMixin):
            patch_for_training(self.model, {})
        return checkpoint

    return setup_model


def _auto_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    # What predictors, trackers and validators run, after fusing.
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        model = getattr(self, "model", None)
        # A model with patched blocks was patched by hand, perhaps with layers left out.
        if _in_force() and isinstance(model, nn.Module) and count_blocks(model)[0] == 0:
            wanted = _config.cuda_graph() and graphs.why_not(_unwrap(model)) is None
            try:
                patch_model(model, cuda_graph=wanted)
            except PatchError as error:
                _compat.get_logger().info(f"yolo12_fastconv: not patched: {error}")

    return init


def _in_force() -> bool:
    return _active and not _config.disabled()


def install() -> bool:
    """Patch every model that this process trains, validates, predicts or tracks with. A second call changes nothing.

    Exports hold standard operators in any case. `YOLO.model` itself stays stock, except where Ultralytics predicts and
    validates with it instead of with a copy (before 8.4.136).

    Returns:
        Whether the patch is in force; False if ``YOLO12_FASTCONV_DISABLE`` is set.
    """
    global _active
    methods = [
        (Model, "_smart_load", _smart_load),
        (BaseTrainer, "setup_model", _setup_model),
        (AutoBackend, "__init__", _auto_backend),
    ]
    if _config.disabled():
        return False
    with _lock:
        for owner, name, make in methods:
            if not any((w.owner, w.name) == (owner, name) for w in _wrapped):
                original = vars(owner)[name]
                replacement = functools.wraps(original)(make(original))
                setattr(owner, name, replacement)
                _wrapped.append(_Wrapped(owner, name, original, replacement))
        _active = True
    return True


def uninstall() -> None:
    """Undo `install`. What was patched stays patched. A second call changes nothing."""
    global _active
    with _lock:
        _active = False
        for wrapped in list(_wrapped):
            # Unless somebody has wrapped ours in turn: then it stays, and only passes calls on.
            if vars(wrapped.owner)[wrapped.name] is wrapped.replacement:
                setattr(wrapped.owner, wrapped.name, wrapped.original)
                _wrapped.remove(wrapped)
