import itertools
from pathlib import Path

import msgspec
import pytest
import torch

from loka.core.errors import InvalidInput, UnknownName
from loka.data.batch import Batch
from loka.data.dataset import DATASETS, Source, open_dataset
from loka.data.synthetic import Drift, Synthetic

TINY = {
    "onehot_sizes": (10, 100),
    "n_dense": 3,
    "multihot_sizes": (20,),
    "bag_length": 2,
    "sequence_size": 30,
    "sequence_length": 4,
}


def test_the_known_data_sets_are_listed() -> None:
    assert DATASETS.names() == ["criteo", "movielens", "synthetic"]


def test_a_misspelt_name_or_option_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"no data set is called 'criteoo'. Did you mean 'criteo'\? Known: criteo, movielens"):
        open_dataset("criteoo")
    with pytest.raises(
        InvalidInput, match=r"'synthetic' has no option 'bag_len'. Did you mean 'bag_length'\? Known: onehot_sizes"
    ):
        open_dataset("synthetic", bag_len=3)
    with pytest.raises(InvalidInput, match=r"option 'drift', has no option 'scale_it'. Did you mean 'scale_at'\?"):
        open_dataset("synthetic", drift={"scale_it": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zipf": "steep"}, "zipf"),
        ({"dense": "sqrt"}, "dense"),
        ({"base_rate": 1.5}, "base_rate is 1.5: it must lie between 0 and 1"),
        ({"drift": '{"scale_at": '}, "option 'drift': .* is not JSON"),
        ({"drift": {"scale_features": [3]}, "n_dense": 3}, "there are 3 dense features"),
        ({"onehot_sizes": ()}, "at least one feature"),
        ({"multihot_sizes": ()}, "give both or neither"),
        ({"sequence_size": 0}, "both 0 for no sequence"),
        ({"missing": 0.9}, "missing is 0.9"),
        ({"zipf": 0}, "zipf"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        open_dataset("synthetic", **{**TINY, **options})


def test_options_may_come_as_text_from_a_command_line() -> None:
    as_text = {"onehot_sizes": "[10, 100]", "n_dense": "3", "zipf": "1.2", "dense": "raw", "drift": '{"scale_features": [1]}'}
    data = open_dataset("synthetic", **{**TINY, **as_text})
    same = open_dataset("synthetic", **{**TINY, "zipf": 1.2, "dense": "raw", "drift": Drift(scale_features=(1,))})
    assert isinstance(data, Synthetic)
    assert isinstance(same, Synthetic)
    assert data.options == same.options


def test_seeds_paths_and_batch_sizes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="seed is -1"):
        open_dataset("synthetic", seed=-1)
    with pytest.raises(InvalidInput, match="is made, not read: leave out the path"):
        open_dataset("synthetic", path=tmp_path)
    with pytest.raises(InvalidInput, match="batch_size is 0"):
        next(open_dataset("synthetic", **TINY).train(0))


def test_a_data_set_is_added_by_registering_it() -> None:
    class Options(msgspec.Struct):
        n: int = 1

    class Constant:
        def __init__(self, options: Options) -> None:
            self.n = options.n

    DATASETS.add("constant", Source(Options, lambda path, seed, device, options: Constant(options)))
    try:
        assert open_dataset("constant", n=4).n == 4
    finally:
        DATASETS.remove("constant")


def test_a_batch_moves_with_all_it_holds() -> None:
    batch = next(open_dataset("synthetic", **TINY).train(5))
    moved = batch.to("meta")
    for name, value in vars(moved).items():
        assert value.device == torch.device("meta"), name
        assert value.shape == getattr(batch, name).shape


@pytest.mark.parametrize("name", ["synthetic", "criteo", "movielens"])
def test_every_data_set_keeps_to_its_schema(name: str, criteo_file: Path, movielens_folder: Path) -> None:
    paths = {"criteo": criteo_file, "movielens": movielens_folder}
    data = open_dataset(name, path=paths.get(name), **(TINY if name == "synthetic" else {}))
    schema = data.schema
    batches: list[Batch] = [*itertools.islice(data.train(32), 8), *itertools.islice(data.test(32), 4)]
    for batch in batches:
        n = len(batch)
        assert (batch.dense_BD.shape, batch.dense_BD.dtype) == ((n, schema.n_dense), torch.float32)
        assert (batch.onehot_BF.shape, batch.onehot_BF.dtype) == ((n, len(schema.onehot_sizes)), torch.int64)
        assert (batch.onehot_BF >= 0).all()
        assert (batch.onehot_BF < torch.tensor(schema.onehot_sizes)).all()
        assert batch.label_B.dtype == torch.float32
        assert set(batch.label_B.tolist()) <= {0.0, 1.0}
        assert (batch.multihot_BGS is not None) == bool(schema.multihot_sizes)
        if batch.multihot_BGS is not None:
            assert batch.multihot_BGS.shape == (n, len(schema.multihot_sizes), schema.bag_length)
            assert (batch.multihot_BGS >= -1).all()
            assert (batch.multihot_BGS < torch.tensor(schema.multihot_sizes)[:, None]).all()
        assert (batch.sequence_BL is not None) == (schema.sequence_length > 0)
        if batch.sequence_BL is not None:
            assert batch.times_BL is not None
            assert batch.sequence_BL.shape == batch.times_BL.shape == (n, schema.sequence_length)
            present = batch.sequence_BL != -1
            assert (batch.sequence_BL < schema.sequence_size).all()
            assert (present.int().diff(dim=1) >= 0).all()  # padding in front
            assert (batch.times_BL[~present] == 0).all()
            assert (batch.times_BL[present] > 0).all()
            decreasing = batch.times_BL.diff(dim=1) <= 0
            assert decreasing[present[:, :-1]].all()  # oldest first
