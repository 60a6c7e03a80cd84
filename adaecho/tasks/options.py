"""The keys ``task.*`` of the tasks of this package, in a file that imports no torch.

A command's configs are composed, checked and compared before anything trains, and a sweep's parent process
never does. A task of one's own has its ``Options`` in its own file.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from adaecho.config.launch_env import launched_ranks
from adaecho.config.tasks import Size, TaskConfig
from adaecho.config.validation import at_least, check_depth, one_of, within
from adaecho.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from adaecho.config.schema import Config

DIGITS_MODELS = ("conv", "mlp")
PACKINGS = ("packed", "sentence")
_BYTES_PER_TOKEN = 3  # of English with a vocabulary of some thousand; only the scale matters
_MOST_SCENES = 100_000  # drawn into memory, 12 kB each
GHOST_STATISTICS = ("average", "sequential")


@dataclass
class GhostOptions(TaskConfig):
    """The keys ``task.ghost_*``."""

    ghost_size: int | None = None  # examples per slice of virtual batch norm; null: the whole batch
    ghost_statistics: str = "average"  # average | sequential: running statistics over a step's slices

    def __post_init__(self) -> None:
        one_of("task.ghost_statistics", self.ghost_statistics, GHOST_STATISTICS)

    def check_batches(self, config: "Config") -> None:
        """Raises ConfigError where slices of ``ghost_size`` don't make up a batch or its micro-batches."""
        size, ranks = self.ghost_size, launched_ranks()
        parts = config.adascale.num_gradients_to_accumulate
        if size is not None and (size < 1 or config.batch_size % (parts * size)):
            raise ConfigError(
                f"task.ghost_size={size}: the {config.batch_size} examples of a batch on each of {ranks} "
                f"ranks, in {parts} micro-batches, are not made of slices of {size}; choose sizes that "
                "divide, or task.ghost_size=null"
            )

    def with_ghosts(self, model: "nn.Module") -> "nn.Module":
        """The model, its batch norm replaced where ``ghost_size`` is set."""
        from adaecho.models.ghost_batch_norm import use_ghost_batch_norm

        if self.ghost_size is None:
            return model
        return use_ghost_batch_norm(model, self.ghost_size, self.ghost_statistics)  # type: ignore[arg-type]


@dataclass
class TextOptions(TaskConfig):
    """The keys ``task.*`` of a language model; by default Transformer base (Vaswani et al. 2017, Table 3)."""

    layers: int = 6
    width: int = 512
    feed_forward: int = 2048
    heads: int = 8
    dropout: float = 0.0
    vocabulary: int = 32000  # subwords of a tokenizer that is trained on the training text
    block: int = 128  # predictions of an example
    packing: str = "packed"  # packed: documents joined and cut; sentence: one document an example, with mask
    column: str = "text"  # of parquet and JSON lines
    lines: bool = False  # each line of a text file is a document, instead of the file
    label_smoothing: float = 0.0  # of the training loss: this share of each token goes to all alike
    added: ClassVar[tuple[str, ...]] = ("label_smoothing",)
    module: ClassVar[str] = "text"
    needs: ClassVar[str] = ""  # what to give as data.path, where none is no choice

    def __post_init__(self) -> None:
        one_of("task.packing", self.packing, PACKINGS)
        self.check_sizes()

    def check_sizes(self) -> None:
        """Raises ConfigError where one can't be."""
        for key in ("layers", "width", "feed_forward", "heads", "block"):
            at_least(f"task.{key}", getattr(self, key), 1)
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"task.width={self.width}: must be a multiple of 2 * task.heads={2 * self.heads}"
            )
        within("task.dropout", self.dropout, "[0, 1)")
        within("task.label_smoothing", self.label_smoothing, "[0, 1)")
        if self.vocabulary < 258:
            raise ConfigError(
                f"task.vocabulary={self.vocabulary}: must be at least 258, the bytes and two special tokens"
            )

    @classmethod
    def size_of(cls, path: str, plain: dict[str, Any], max_bad_examples: int) -> Size:  # noqa: ARG003
        """About how many blocks there are, by their bytes; all documents are looked at."""
        from adaecho.datasets.documents import find_documents

        documents = find_documents(path, column=plain["column"], lines=plain["lines"])
        number = size = 0
        for shard in documents.parts["train"]:
            for _, text in documents.read(shard):
                number += isinstance(text, Exception) or bool(text.strip())
                size += 0 if isinstance(text, Exception) else len(text.encode())
        blocks = max(size // _BYTES_PER_TOKEN // plain["block"], 1)
        return Size(blocks, number, documents.held_out is not None, "blocks")

    def build_model(self) -> "nn.Module":
        """A freshly initialised model."""
        from adaecho.models.transformer import Transformer

        return Transformer(
            self.vocabulary,
            layers=self.layers,
            width=self.width,
            feed_forward=self.feed_forward,
            heads=self.heads,
            dropout=self.dropout,
        )


@dataclass
class DigitsOptions(TaskConfig):
    """The options of task digits."""

    # conv: small, with batch norm; mlp: one hidden layer without, many steps in little time
    model: str = "conv"
    training_examples: int | None = None  # of those that are not held out; null: all
    label_smoothing: float = 0.0  # of the training loss: this share of each label goes to all classes alike
    added: ClassVar[tuple[str, ...]] = ("model", "training_examples", "label_smoothing")

    def __post_init__(self) -> None:
        at_least("task.training_examples", self.training_examples, 1)
        within("task.label_smoothing", self.label_smoothing, "[0, 1)")
        one_of("task.model", self.model, DIGITS_MODELS)


@dataclass
class Cifar10Options(TaskConfig):
    """The options of task cifar10."""

    depth: int = 32  # layers of the ResNet, 6n + 2: 32 is the paper's, 8 trains on a CPU
    channels: int = 16  # filters of its first stage; 16 is the paper's
    training_examples: int | None = None  # of those that are not held out; null: all
    validation_shards: str | None = None  # tar shards, where data.path names training shards alone
    label_smoothing: float = 0.0  # of the training loss: this share of each label goes to all classes alike
    added: ClassVar[tuple[str, ...]] = (
        "depth",
        "channels",
        "training_examples",
        "validation_shards",
        "label_smoothing",
    )

    def __post_init__(self) -> None:
        within("task.label_smoothing", self.label_smoothing, "[0, 1)")
        check_depth(self.depth)
        at_least("task.channels", self.channels, 1)
        at_least("task.training_examples", self.training_examples, 1)


@dataclass
class ImagenetOptions(GhostOptions):
    """The options of task imagenet."""

    model: str = "resnet50"  # a name of timm's
    image_size: int = 224  # pixels
    num_classes: int | None = None  # null: as many as the training data names
    validation_path: str | None = None  # tar shards, or where else data.path has no validation split
    ghost_size: int | None = 32  # examples per slice of virtual batch norm; null: the whole batch
    min_crop_area: float = 0.08  # of the image's; the largest is 1
    colour_distortion: float = 0.4  # of brightness, contrast and saturation; 0 for none
    antialias: bool = True
    pretrained: str | None = None  # file of weights to begin with: timm's for the model, or a run's
    label_smoothing: float = 0.0  # of the training loss: this share of each label goes to all classes alike
    added: ClassVar[tuple[str, ...]] = ("pretrained", "label_smoothing")

    def __post_init__(self) -> None:
        within("task.label_smoothing", self.label_smoothing, "[0, 1)")
        at_least("task.image_size", self.image_size, 8)
        at_least("task.num_classes", self.num_classes, 2)
        within("task.min_crop_area", self.min_crop_area, "(0, 1]")
        within("task.colour_distortion", self.colour_distortion, "[0, 1]")
        super().__post_init__()

    @classmethod
    def size_of(cls, path: str, plain: dict[str, Any], max_bad_examples: int) -> Size:  # noqa: ARG003
        """How many photographs there are; nothing is decoded, and no torch is loaded."""
        from adaecho.datasets.labelled_images import find_both

        train, validation = find_both(path, plain["validation_path"])
        source = train.source  # tar shards are read through once
        number = len(source) if hasattr(source, "__len__") else sum(1 for _ in source)
        return Size(number, number, validation is not None)


@dataclass
class CocoOptions(GhostOptions):
    """The options of task coco."""

    image_size: int = 300  # side of the network's input, pixels; 300 has the paper's 8,732 default boxes
    ghost_size: int | None = 128  # examples per slice of virtual batch norm; null: the whole batch
    keep_images_without_boxes: bool = False  # SSD learns nothing from them; they cost fresh examples
    expand: float = 0.5  # probability that an image is put on a canvas of up to 4 times its sides
    metrics_per_category: bool = False  # report AP_50/<category> too

    def __post_init__(self) -> None:
        at_least("task.image_size", self.image_size, 64)
        within("task.expand", self.expand, "[0, 1]")
        super().__post_init__()

    @classmethod
    def size_of(cls, path: str, plain: dict[str, Any], max_bad_examples: int) -> Size:
        """How many images there are, by default those with boxes."""
        from adaecho.datasets.coco import read_both
        from adaecho.datasets.storage import SkippedExamples

        images, validation, _ = read_both(path, SkippedExamples(max_bad_examples))
        usable = images if plain["keep_images_without_boxes"] else images.with_boxes()
        return Size(len(usable), len(images), validation is not None)


@dataclass
class ScenesOptions(GhostOptions):
    """The options of task scenes."""

    training_scenes: int = 2000
    metrics_per_category: bool = False  # report AP_50/<digit> too

    def __post_init__(self) -> None:
        at_least("task.training_scenes", self.training_scenes, 1)
        if self.training_scenes > _MOST_SCENES:
            raise ConfigError(
                f"task.training_scenes={self.training_scenes}: must be at most {_MOST_SCENES:,}"
            )
        super().__post_init__()


@dataclass
class SmallTextOptions(TextOptions):
    """The options of task small_text: a small Transformer, by default on the source of Python's own library.

    That differs between Python versions: its sha256 is in the record, and results are never compared across
    versions.
    """

    layers: int = 2
    width: int = 128
    feed_forward: int = 512
    heads: int = 4
    vocabulary: int = 4096


@dataclass
class Lm1bOptions(TextOptions):
    """The options of task lm1b (Chelba et al. 2014), as in the paper's Table 1: 3.9 nats a token.

    An example is one sentence, with a mask: 20,000 steps of 1,024 are 0.68 epoch of 30.3 M sentences, where
    packed blocks of 128 would be about 3, and the paper's budget reads as less than one.
    """

    packing: str = "sentence"
    lines: bool = True
    needs: ClassVar[str] = (
        "a folder with parquet files (column text) or with the original text files, a sentence a line, or "
        "the hub id of such a copy; the hub's own lm1b was a script, which datasets no longer runs"
    )


@dataclass
class CommonCrawlOptions(TextOptions):
    """The options of task common_crawl, as in the paper's Table 1: 3.9 nats a token, within one epoch.

    Documents are streamed, made into many examples each, and never held together: the paper's set is 6.7 TB.
    The tokenizer is trained on the first of them and kept in the cache of ``adaecho.datasets.tokens``.
    """

    packing: str = "document"  # the only one: the blocks of a document, the last filled up
    tokenizer_documents: int = 10_000  # the first ones, on which the tokenizer is trained
    needs: ClassVar[str] = (
        "a folder with C4's files (c4-train.*.json.gz and c4-validation.*.json.gz), parquet with a column of "
        "text, or a hub id, which is downloaded whole"
    )

    def __post_init__(self) -> None:
        if self.packing != "document":
            raise ConfigError(f"task.packing={self.packing}: task common_crawl has document alone")
        at_least("task.tokenizer_documents", self.tokenizer_documents, 1)
        self.check_sizes()


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
