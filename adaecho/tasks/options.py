"""The options ``task.*`` of the built-in tasks, in a file that imports no torch.

The parent process of a sweep composes, checks and compares configs without torch. The ``Options`` of a user's
own task are in the task's file.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from adaecho.config.launch_env import launched_ranks
from adaecho.config.tasks import Size, TaskConfig
from adaecho.config.validation import one_of, within
from adaecho.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from adaecho.config.schema import Config

Keys = tuple[str, ...]
Choices = dict[str, tuple[str, ...]]
Bounds = dict[str, str]
"""Intervals of numeric keys."""

_BYTES_PER_TOKEN = 3  # rough, of English with some thousand subwords


@dataclass
class CheckedOptions(TaskConfig):
    """Base class that checks ranges and choices."""

    bounds: ClassVar[Bounds] = {}
    choices: ClassVar[Choices] = {}

    def __post_init__(self) -> None:
        for key, interval in self.bounds.items():
            within(f"task.{key}", getattr(self, key), interval)
        for key, allowed in self.choices.items():
            one_of(f"task.{key}", getattr(self, key), allowed)


@dataclass
class GhostOptions(CheckedOptions):
    """The keys ``task.ghost_*``."""

    ghost_size: int | None = None  # examples per slice of ghost batch norm; null: plain batch norm
    ghost_statistics: str = "average"  # average | sequential: update of running statistics in a step
    choices: ClassVar[Choices] = {"ghost_statistics": ("average", "sequential")}

    def check_batches(self, config: "Config") -> None:
        """Raise a ConfigError if ``ghost_size`` does not divide a batch into micro-batches of slices."""
        size, parts = self.ghost_size, config.adascale.num_gradients_to_accumulate
        if size is not None and (size < 1 or config.batch_size % (parts * size)):
            raise ConfigError(
                f"task.ghost_size={size}: does not divide the {config.batch_size} examples of each of "
                f"{launched_ranks()} ranks, in {parts} micro-batches; choose sizes that divide, or "
                "task.ghost_size=null"
            )

    def with_ghosts(self, model: "nn.Module") -> "nn.Module":
        """The model, with ghost batch norm if ``ghost_size`` is set."""
        from adaecho.models.ghost_batch_norm import use_ghost_batch_norm

        if self.ghost_size is None:
            return model
        return use_ghost_batch_norm(model, self.ghost_size, self.ghost_statistics)  # type: ignore[arg-type]


@dataclass
class TextOptions(CheckedOptions):
    """The keys ``task.*`` of a language model; by default Transformer base (Vaswani et al. 2017, Table 3)."""

    layers: int = 6
    width: int = 512
    feed_forward: int = 2048
    heads: int = 8
    dropout: float = 0.0
    vocab_size: int = 32000  # subwords of a tokenizer trained on the training text; at least 256 bytes + 2
    block_size: int = 128  # predictions of an example
    packing: str = "packed"  # packed: join documents and cut; sentence: one document per example, padded
    column: str = "text"  # of parquet and JSON lines
    sample_by: str = "document"  # line | document: what a text file consists of
    label_smoothing: float = 0.0  # of the training loss: this share of each target spreads over all tokens
    added: ClassVar[Keys] = ("label_smoothing",)
    module: ClassVar[str] = "text"
    needs: ClassVar[str] = ""  # accepted data, if data.path has no default
    choices: ClassVar[Choices] = {"packing": ("packed", "sentence")}
    bounds: ClassVar[Bounds] = {
        **dict.fromkeys(("layers", "width", "feed_forward", "heads", "block_size"), "[1, inf)"),
        **dict.fromkeys(("dropout", "label_smoothing"), "[0, 1)"),
        "vocab_size": "[258, inf)",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            raise ConfigError(f"task.width={self.width}: must be a multiple of twice task.heads={self.heads}")

    @classmethod
    def size_of(cls, path: str, plain: dict[str, Any], max_bad_examples: int) -> Size:  # noqa: ARG003
        """Number of blocks, estimated from the bytes of all documents."""
        from adaecho.datasets.documents import find_documents

        documents = find_documents(path, column=plain["column"], lines=plain["sample_by"] == "line")
        texts = (text for shard in documents.splits["train"] for _, text in documents.read(shard))
        sizes = [len(text.encode()) for text in texts if isinstance(text, str) and text.strip()]
        blocks = max(sum(sizes) // _BYTES_PER_TOKEN // plain["block_size"], 1)
        return Size(blocks, len(sizes), documents.held_out is not None)

    def build_model(self) -> "nn.Module":
        """A freshly initialised model."""
        from adaecho.models.transformer import Transformer

        sizes = ("layers", "width", "feed_forward", "heads", "dropout")
        return Transformer(self.vocab_size, **{name: getattr(self, name) for name in sizes})


@dataclass
class DigitsOptions(CheckedOptions):
    """The options of task digits."""

    # conv: small, with batch norm; mlp: one hidden layer without batch norm, for many steps in little time
    model: str = "conv"
    training_examples: int | None = None  # the first ones that are not held out; null: all
    label_smoothing: float = 0.0  # of the training loss: this share of each target spreads over all classes
    added: ClassVar[Keys] = ("model", "training_examples", "label_smoothing")
    bounds: ClassVar[Bounds] = {"training_examples": "[1, inf)", "label_smoothing": "[0, 1)"}
    choices: ClassVar[Choices] = {"model": ("conv", "mlp")}


@dataclass
class Cifar10Options(CheckedOptions):
    """The options of task cifar10."""

    depth: int = 32  # layers of the ResNet, 6n + 2: 32 is the paper's, 8 trains on a CPU
    channels: int = 16  # filters of the first stage; 16 is the paper's
    training_examples: int | None = None  # the first ones that are not held out; null: all
    validation_shards: str | None = None  # tar shards, if data.path names training shards only
    label_smoothing: float = 0.0  # of the training loss: this share of each target spreads over all classes
    added: ClassVar[Keys] = ("depth", "channels", "training_examples", "validation_shards", "label_smoothing")
    bounds: ClassVar[Bounds] = {
        "channels": "[1, inf)",
        "training_examples": "[1, inf)",
        "label_smoothing": "[0, 1)",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 8 or self.depth % 6 != 2:
            raise ConfigError(f"task.depth={self.depth}: must be 6n + 2; choose 8, 14, 20, 26, 32, 44 or 56")


@dataclass
class ImagenetOptions(GhostOptions):
    """The options of task imagenet."""

    model: str = "resnet50"  # name of a timm model
    image_size: int = 224  # pixels
    num_classes: int | None = None  # null: the number of classes that the training data names
    validation_path: str | None = None  # validation images, if data.path has no validation split
    ghost_size: int | None = 32  # examples per slice of ghost batch norm; null: plain batch norm
    min_crop_area: float = 0.08  # smallest share of the image's area; the largest is 1
    color_jitter: float = 0.4  # of brightness, contrast and saturation; 0: none
    antialias: bool = True
    pretrained: str | None = None  # file of initial weights: timm's of the model, or a run's
    label_smoothing: float = 0.0  # of the training loss: this share of each target spreads over all classes
    added: ClassVar[Keys] = ("pretrained", "label_smoothing")
    bounds: ClassVar[Bounds] = {
        "image_size": "[8, inf)",
        "num_classes": "[2, inf)",
        "min_crop_area": "(0, 1]",
        "color_jitter": "[0, 1]",
        "label_smoothing": "[0, 1)",
    }

    @classmethod
    def size_of(cls, path: str, plain: dict[str, Any], max_bad_examples: int) -> Size:  # noqa: ARG003
        """Number of images, without decoding them."""
        from adaecho.datasets.labelled_images import find_both

        train, validation = find_both(path, plain["validation_path"])
        source = train.source
        number = len(source) if hasattr(source, "__len__") else sum(1 for _ in source)  # shards are read once
        return Size(number, number, validation is not None)


@dataclass
class CocoOptions(GhostOptions):
    """The options of task coco."""

    image_size: int = 300  # side of the network's input, pixels; 300 has the paper's 8,732 default boxes
    ghost_size: int | None = 128  # examples per slice of ghost batch norm; null: plain batch norm
    keep_images_without_boxes: bool = False  # SSD learns nothing from them, but they cost fresh examples
    expand: float = 0.5  # probability of placing an image on a canvas of up to 4 times its sides
    metrics_per_category: bool = False  # report AP_50/<category> too
    module: ClassVar[str] = "detection"
    bounds: ClassVar[Bounds] = {"image_size": "[64, inf)", "expand": "[0, 1]"}

    @classmethod
    def size_of(cls, path: str, plain: dict[str, Any], max_bad_examples: int) -> Size:
        """Number of images, by default of those with boxes."""
        from adaecho.datasets.coco import read_both
        from adaecho.datasets.storage import BadExampleBudget

        images, validation, _ = read_both(path, BadExampleBudget(max_bad_examples))
        usable = images if plain["keep_images_without_boxes"] else images.with_boxes()
        return Size(len(usable), len(images), validation is not None)


@dataclass
class ScenesOptions(GhostOptions):
    """The options of task scenes."""

    training_scenes: int = 2000
    metrics_per_category: bool = False  # report AP_50/<digit> too
    module: ClassVar[str] = "detection"
    bounds: ClassVar[Bounds] = {"training_scenes": "[1, 100000]"}  # in memory, 12 kB each


@dataclass
class SmallTextOptions(TextOptions):
    """The options of task small_text: a small Transformer, by default on Python's standard library.

    The library differs between Python versions. The record has its sha256, and results are not compared
    across versions.
    """

    layers: int = 2
    width: int = 128
    feed_forward: int = 512
    heads: int = 4
    vocab_size: int = 4096


@dataclass
class Lm1bOptions(TextOptions):
    """The options of task lm1b (Chelba et al. 2014), as in the paper's Table 1: 3.9 nats a token.

    An example is one padded sentence: 20,000 steps of 1,024 sentences are 0.68 epoch of 30.3 M sentences.
    Packed blocks of 128 would be about 3 epochs, but the paper's budget is less than one.
    """

    packing: str = "sentence"
    sample_by: str = "line"
    needs: ClassVar[str] = (
        "a folder with parquet files (column text) or with the original text files (one sentence per line), "
        "or the hub id of such a copy; the hub's own lm1b was a script, which datasets no longer runs"
    )


@dataclass
class CommonCrawlOptions(TextOptions):
    """The options of task common_crawl, as in the paper's Table 1: 3.9 nats a token, within one epoch.

    Documents are streamed and each makes many examples; the paper's set of 6.7 TB does not fit in memory.
    The tokenizer is trained on the first documents and cached.
    """

    packing: str = "document"  # the only choice: the blocks of one document, the last one padded
    tokenizer_documents: int = 10_000  # the first ones train the tokenizer
    needs: ClassVar[str] = (
        "a folder with C4's files (c4-train.*.json.gz and c4-validation.*.json.gz), parquet with a column of "
        "text, or a hub id, which is downloaded completely"
    )
    choices: ClassVar[Choices] = {"packing": ("document",)}
    bounds: ClassVar[Bounds] = {**TextOptions.bounds, "tokenizer_documents": "[1, inf)"}


OPTIONS: dict[str, type[TaskConfig]] = {
    "digits": DigitsOptions,
    "cifar10": Cifar10Options,
    "imagenet": ImagenetOptions,
    "coco": CocoOptions,
    "scenes": ScenesOptions,
    "small_text": SmallTextOptions,
    "lm1b": Lm1bOptions,
    "common_crawl": CommonCrawlOptions,
}
