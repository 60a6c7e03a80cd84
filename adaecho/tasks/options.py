"""The options ``task.*`` of the built-in tasks.

This file does not import torch. This saves seconds in the parent process of a sweep, which only checks
configs.
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
"""The allowed interval of each numeric key."""

_BYTES_PER_TOKEN = 3  # rough estimate for English text with a few thousand subwords


@dataclass
class CheckedOptions(TaskConfig):
    """Base class of task options that checks the range or choice of each value at creation."""

    bounds: ClassVar[Bounds] = {}
    choices: ClassVar[Choices] = {}

    def __post_init__(self) -> None:
        for key, interval in self.bounds.items():
            within(f"task.{key}", getattr(self, key), interval)
        for key, allowed in self.choices.items():
            one_of(f"task.{key}", getattr(self, key), allowed)


@dataclass
class GhostOptions(CheckedOptions):
    """The options ``task.ghost_*`` for ghost batch norm, which normalizes slices of a batch separately."""

    ghost_size: int | None = None  # number of examples per slice of ghost batch norm; null: plain batch norm
    # how the slices of a step update the running statistics: average or sequential
    ghost_statistics: str = "average"
    choices: ClassVar[Choices] = {"ghost_statistics": ("average", "sequential")}

    def check_batches(self, config: "Config") -> None:
        """Raise a ConfigError if the size of a micro-batch is not a multiple of ``ghost_size``."""
        size, parts = self.ghost_size, config.adascale.num_gradients_to_accumulate
        if size is not None and (size < 1 or config.batch_size % (parts * size)):
            raise ConfigError(
                f"task.ghost_size={size}: does not divide the {config.batch_size} examples of each of "
                f"{launched_ranks()} ranks in {parts} micro-batches; choose sizes that divide, or "
                "task.ghost_size=null"
            )

    def with_ghosts(self, model: "nn.Module") -> "nn.Module":
        """Return the model, with ghost batch norm in place of batch norm if ``ghost_size`` is set."""
        from adaecho.models.ghost_batch_norm import use_ghost_batch_norm

        if self.ghost_size is None:
            return model
        return use_ghost_batch_norm(model, self.ghost_size, self.ghost_statistics)  # type: ignore[arg-type]


@dataclass
class TextOptions(CheckedOptions):
    """The options of a language model. The defaults are Transformer base (Vaswani et al. 2017, Table 3)."""

    layers: int = 6
    width: int = 512
    feed_forward: int = 2048
    heads: int = 8
    dropout: float = 0.0
    # number of subwords of the tokenizer, which is trained on the training text; at least 258, for 256 bytes
    # and 2 special tokens
    vocab_size: int = 32000
    block_size: int = 128  # number of tokens that are predicted in one example
    # packed joins documents and cuts them into blocks; sentence makes each document one padded example
    packing: str = "packed"
    column: str = "text"  # column of parquet files, or field of JSON lines, that contains the text
    sample_by: str = "document"  # document: a text file is one document; line: each line is one
    # share of the target probability that the training loss spreads evenly over all tokens
    label_smoothing: float = 0.0
    added: ClassVar[Keys] = ("label_smoothing",)
    module: ClassVar[str] = "text"
    needs: ClassVar[str] = ""  # describes the accepted data if the user must set data.path
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
        """Return the size of the text data, with an estimated number of examples."""
        from adaecho.datasets.documents import find_documents

        documents = find_documents(path, column=plain["column"], lines=plain["sample_by"] == "line")
        texts = (text for shard in documents.splits["train"] for _, text in documents.read(shard))
        sizes = [len(text.encode()) for text in texts if isinstance(text, str) and text.strip()]
        blocks = max(sum(sizes) // _BYTES_PER_TOKEN // plain["block_size"], 1)
        return Size(blocks, len(sizes), documents.held_out is not None)

    def build_model(self) -> "nn.Module":
        """Return a newly initialized model."""
        from adaecho.models.transformer import Transformer

        sizes = ("layers", "width", "feed_forward", "heads", "dropout")
        return Transformer(self.vocab_size, **{name: getattr(self, name) for name in sizes})


@dataclass
class DigitsOptions(CheckedOptions):
    """The options of task digits."""

    # conv is a small convolutional network with batch norm; mlp has one hidden layer and no batch norm, and
    # trains faster
    model: str = "conv"
    # number of training examples, which are the first ones that are not held out; null: all
    training_examples: int | None = None
    # share of the target probability that the training loss spreads evenly over all classes
    label_smoothing: float = 0.0
    added: ClassVar[Keys] = ("model", "training_examples", "label_smoothing")
    bounds: ClassVar[Bounds] = {"training_examples": "[1, inf)", "label_smoothing": "[0, 1)"}
    choices: ClassVar[Choices] = {"model": ("conv", "mlp")}


@dataclass
class Cifar10Options(CheckedOptions):
    """The options of task cifar10."""

    # number of layers of the ResNet, 6n + 2; the paper uses 32, and 8 can be trained on a CPU
    depth: int = 32
    channels: int = 16  # number of filters in the first stage; the paper uses 16
    # number of training examples, which are the first ones that are not held out; null: all
    training_examples: int | None = None
    # tar shards of the validation split, if data.path names only training shards
    validation_shards: str | None = None
    # share of the target probability that the training loss spreads evenly over all classes
    label_smoothing: float = 0.0
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
    image_size: int = 224  # height and width of the model's input in pixels
    num_classes: int | None = None  # null: the number of classes named in the training data
    validation_path: str | None = None  # path of the validation images if data.path does not contain them
    ghost_size: int | None = 32  # number of examples per slice of ghost batch norm; null: plain batch norm
    min_crop_area: float = 0.08  # smallest area of a random crop, as a share of the image's area
    color_jitter: float = 0.4  # largest relative change of brightness, contrast and saturation; 0: none
    antialias: bool = True  # whether images are resized with antialiasing
    # file of initial weights, either timm's for this model or those of another run; null: random weights
    pretrained: str | None = None
    # share of the target probability that the training loss spreads evenly over all classes
    label_smoothing: float = 0.0
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
        """Return the number of images, without decoding them."""
        from adaecho.datasets.labeled_images import find_both

        train, validation = find_both(path, plain["validation_path"])
        source = train.source
        number = len(source) if hasattr(source, "__len__") else sum(1 for _ in source)  # reads all shards
        return Size(number, number, validation is not None)


@dataclass
class CocoOptions(GhostOptions):
    """The options of task coco."""

    # height and width of the model's input in pixels; 300 gives the 8,732 default boxes of the SSD paper
    image_size: int = 300
    ghost_size: int | None = 128  # number of examples per slice of ghost batch norm; null: plain batch norm
    # whether to train on images without boxes; SSD learns nothing from them, but they count as fresh examples
    keep_images_without_boxes: bool = False
    expand: float = 0.5  # probability of placing an image on a canvas with sides up to 4 times as long
    metrics_per_category: bool = False  # whether to report AP_50/<category> for each category too
    module: ClassVar[str] = "detection"
    bounds: ClassVar[Bounds] = {"image_size": "[64, inf)", "expand": "[0, 1]"}

    @classmethod
    def size_of(cls, path: str, plain: dict[str, Any], max_bad_examples: int) -> Size:
        """Return the number of images. By default, only images with boxes are training examples."""
        from adaecho.datasets.coco import read_both
        from adaecho.datasets.storage import BadExampleBudget

        images, validation, _ = read_both(path, BadExampleBudget(max_bad_examples))
        usable = images if plain["keep_images_without_boxes"] else images.with_boxes()
        return Size(len(usable), len(images), validation is not None)


@dataclass
class ScenesOptions(GhostOptions):
    """The options of task scenes."""

    training_scenes: int = 2000  # number of training scenes
    metrics_per_category: bool = False  # whether to report AP_50/<digit> for each digit too
    module: ClassVar[str] = "detection"
    # The number is limited because all scenes are kept in memory, at 12 kB each.
    bounds: ClassVar[Bounds] = {"training_scenes": "[1, 100000]"}


@dataclass
class SmallTextOptions(TextOptions):
    """The options of task small_text, a small Transformer.

    By default it is trained on the source code of Python's standard library, which differs between Python
    versions. Do not compare results across versions.
    """

    layers: int = 2
    width: int = 128
    feed_forward: int = 512
    heads: int = 4
    vocab_size: int = 4096


@dataclass
class Lm1bOptions(TextOptions):
    """The options of task lm1b, a language model that is trained on single sentences (Chelba et al. 2014)."""

    # The target in the paper's Table 1 is 3.9 nats per token. As in the paper, 20,000 steps at batch size
    # 1,024 are less than one epoch, if each example is one padded sentence.
    packing: str = "sentence"
    sample_by: str = "line"
    needs: ClassVar[str] = (
        "a folder with parquet files (column text) or with the original text files (one sentence per line), "
        "or the Hub ID of a copy; the Hub's lm1b was a script, which datasets no longer supports"
    )


@dataclass
class CommonCrawlOptions(TextOptions):
    """The options of task common_crawl, whose target in the paper's Table 1 is 3.9 nats per token.

    Documents are streamed, because the paper's data of 6.7 TB does not fit in memory.
    """

    packing: str = "document"  # the only choice: each document is cut into blocks, and the last is padded
    tokenizer_documents: int = 10_000  # number of documents on which the tokenizer is trained
    needs: ClassVar[str] = (
        "a folder with C4's files (c4-train.*.json.gz and c4-validation.*.json.gz), parquet files with a "
        "text column, or a Hub ID, whose files are all downloaded"
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
