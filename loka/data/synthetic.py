"""An endless click stream whose labels come from a hidden teacher, so that the best possible log-loss is known.

Ids follow Zipf's law, dense features are counts over many binades (some missing), bags and sequences vary in length, and the
stream may drift. Batch i depends on nothing but the seed, i, the batch size and the kind of device. It is made where it is
used: on the GPU without a host sync.

Axes:  B examples,  D dense features,  and those of ``batch``.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from loka.core.errors import InvalidInput
from loka.data.batch import Batch, FeatureSchema
from loka.data.dataset import DATASETS, Source, check_batch_size
from loka.data.dense import DenseForm
from loka.data.synthetic_features import FeatureLaw, draw_feature_law
from loka.data.synthetic_teacher import calibrate, draw_teacher

CALIBRATION_EXAMPLES = 65_536
# Drawing takes about a hundred launches on a GPU, whatever the size: there consecutive batches are drawn together.
EXAMPLES_AT_ONCE = {"cuda": 32_768}
_DEFAULT_VOCABULARIES = tuple(round(10 * 10_000 ** (f / 25)) for f in range(26))  # 10 to 100 000, evenly in the logarithm


class Drift(msgspec.Struct, frozen=True):
    """What changes as the stream goes on, by training step; nothing by default."""

    popularity_ids_per_step: float = 0.0  # ids rise this many ranks a step, and the most popular falls to the end
    teacher_steps: float = 0.0  # after this many steps the teacher's weights are wholly new; 0: never
    scale_at: int = 0  # the step from which ``scale_features`` are counted in another unit
    scale_features: tuple[int, ...] = ()
    scale_factor: float = 1000.0


class SyntheticOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the stream is like; sizes are numbers of ids."""

    onehot_sizes: tuple[int, ...] = _DEFAULT_VOCABULARIES
    n_dense: int = 16
    multihot_sizes: tuple[int, ...] = (1_000, 20_000)
    bag_length: int = 8
    sequence_size: int = 20_000
    sequence_length: int = 32
    zipf: float = 1.2  # the id of rank k has a share ∝ k^-zipf
    missing: float = 0.1  # mean share of missing values; a feature's own is between none and twice that
    base_rate: float = 0.03
    first_order: float = 1.0  # standard deviation of each order's part of the logit
    second_order: float = 0.9
    third_order: float = 0.7
    dense: DenseForm = DenseForm.LOG
    test_examples: int = 65_536
    teacher_seed: int = 0  # not the stream's seed, so that runs over several seeds learn the same function
    drift: Drift = Drift()

    def __post_init__(self) -> None:
        if not self.onehot_sizes or min(self.onehot_sizes + self.multihot_sizes) < 1:
            raise InvalidInput("onehot_sizes needs at least one feature, and every feature at least one id")
        if bool(self.multihot_sizes) != (self.bag_length > 0):
            raise InvalidInput(f"multihot_sizes {self.multihot_sizes} with bag_length {self.bag_length}: give both or neither")
        if (self.sequence_size > 0) != (self.sequence_length > 0):
            raise InvalidInput("sequence_size and sequence_length: both 0 for no sequence, or both more than 0")
        if not 0 < self.base_rate < 1:
            raise InvalidInput(f"base_rate is {self.base_rate}: it must lie between 0 and 1")
        if not 0 <= self.missing <= 0.45:
            raise InvalidInput(f"missing is {self.missing}: it must lie between 0 and 0.45, the mean over features")
        if self.zipf <= 0 or self.n_dense < 0 or self.test_examples < 1 or self.teacher_seed < 0:
            raise InvalidInput("zipf and test_examples must be positive, n_dense and teacher_seed not negative")
        if any(not 0 <= d < self.n_dense for d in self.drift.scale_features):
            raise InvalidInput(f"drift.scale_features {self.drift.scale_features}: there are {self.n_dense} dense features")


class Synthetic:
    """The stream that ``options`` describe. Every batch has the teacher's logits, with which a model can be compared.

    ``best_logloss`` is what the teacher itself scores in the long run, before any drift.
    """

    bad_rows = 0

    def __init__(self, seed: int, device: torch.device, options: SyntheticOptions) -> None:
        self.options = options
        self.schema = FeatureSchema(
            n_dense=options.n_dense,
            onehot_sizes=options.onehot_sizes,
            multihot_sizes=options.multihot_sizes,
            bag_length=options.bag_length,
            sequence_size=options.sequence_size,
            sequence_length=options.sequence_length,
        )
        self._seed, self._device = seed, device
        law_seed, teacher_seed, sample_seed = (batch_seed(options.teacher_seed, position) for position in range(3))

        def law_on(device: torch.device) -> FeatureLaw:
            return draw_feature_law(law_seed, self.schema, zipf=options.zipf, missing=options.missing, device=device)

        # The teacher is drawn and calibrated on the CPU whatever the device, so that the task is the same everywhere.
        law = law_on(torch.device("cpu"))
        sample = law.draw(torch.Generator().manual_seed(sample_seed), CALIBRATION_EXAMPLES)
        strengths = (options.first_order, options.second_order, options.third_order)
        teacher = calibrate(draw_teacher(teacher_seed, law), sample, strengths, options.base_rate)
        self.best_logloss = float(expected_logloss(teacher.logits(sample)).mean())
        self.teacher = teacher.to(device)
        self._law = law_on(device)
        scale_D = torch.ones(options.n_dense)
        scale_D[list(options.drift.scale_features)] = options.drift.scale_factor
        self._drifted_scale_D = scale_D.to(device)

    def batches_per_epoch(self, batch_size: int) -> int | None:
        return None

    def train(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        check_batch_size(batch_size)
        at_once = max(1, EXAMPLES_AT_ONCE.get(self._device.type, 1) // batch_size)
        first_block, done = divmod(start, at_once)
        for block in itertools.count(first_block):
            steps = range(block * at_once, (block + 1) * at_once)
            examples = self._draw(2 * block, batch_size, steps)
            for index in range(done, at_once):
                yield examples[index * batch_size : (index + 1) * batch_size]
            done = 0

    def test(self, batch_size: int, *, step: int = 0) -> Iterator[Batch]:
        """``test_examples`` examples that training never sees, from the stream as it is at ``step``."""
        check_batch_size(batch_size)
        for index, first in enumerate(range(0, self.options.test_examples, batch_size)):
            yield self._draw(2 * index + 1, min(batch_size, self.options.test_examples - first), range(step, step + 1))

    def _draw(self, position: int, batch_size: int, steps: range) -> Batch:
        """The batches of ``steps``, one behind the other, from the random numbers of ``position``."""
        # A caller may ask for batches inside its own autocast, which must not make the teacher less precise.
        with torch.autocast(self._device.type, enabled=False):
            n = batch_size * len(steps)
            generator = torch.Generator(self._device).manual_seed(batch_seed(self._seed, position))
            drift, shift_B, turn_B = self.options.drift, None, None
            step_B = torch.arange(steps.start, steps.stop, device=self._device).repeat_interleave(batch_size, output_size=n)
            if drift.popularity_ids_per_step:
                shift_B = (step_B.double() * drift.popularity_ids_per_step).long()
            if drift.teacher_steps:
                turn_B = step_B * (math.pi / 2 / drift.teacher_steps)
            features = self._law.draw(generator, n, shift_B=shift_B)
            logit_B = self.teacher.logits(features, turn_B=turn_B)
            click_B = torch.rand(n, generator=generator, device=self._device) < torch.sigmoid(logit_B)
            count_BD = features.count_BD
            if drift.scale_features:
                count_BD = torch.where((step_B >= drift.scale_at)[:, None], count_BD * self._drifted_scale_D, count_BD)
            return Batch(
                dense_BD=self.options.dense.apply(count_BD),
                onehot_BF=features.onehot_BF,
                label_B=click_B.float(),
                multihot_BGS=features.multihot_BGS,
                sequence_BL=features.sequence_BL,
                times_BL=features.times_BL,
                teacher_logit_B=logit_B,
            )


def expected_logloss(logit: Tensor) -> Tensor:
    """The log-loss to expect where labels are drawn from these log-odds: the entropy of their probabilities, in float64."""
    logit = logit.double()
    return functional.softplus(logit) - torch.sigmoid(logit) * logit


def batch_seed(seed: int, position: int) -> int:
    """A seed of 32 bits, all that torch's CPU generator uses of one; no two positions of a stream get the same.

    Murmur3's finalizer is a bijection, so neighbours get seeds that are far apart and still distinct.
    """
    bits = (_mix32(seed) + position) & 0xFFFFFFFF
    return _mix32(bits)


def _mix32(bits: int) -> int:
    bits ^= bits >> 16
    bits = bits * 0x85EBCA6B & 0xFFFFFFFF
    bits ^= bits >> 13
    bits = bits * 0xC2B2AE35 & 0xFFFFFFFF
    return bits ^ bits >> 16


def _open(path: Path | None, seed: int, device: torch.device, options: SyntheticOptions) -> Synthetic:
    if path is not None:
        raise InvalidInput(f"data set 'synthetic' is made, not read: leave out the path {path}")
    return Synthetic(seed, device, options)


DATASETS.add("synthetic", Source(SyntheticOptions, _open))
